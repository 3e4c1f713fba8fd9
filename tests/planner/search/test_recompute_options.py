"""What may run again: each choice keeps less than the one before, and takes longer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from echelon.cost.inputs.numbers import LayoutNumbers
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.step import step_seconds
from echelon.planner.search.recompute_options import (
    RecomputeOption,
    recompute_options,
    redone_numbers,
)
from echelon.planner.search.request import SearchRequest, make_request

EARLY = ("norm", "activation", "attention")


def _request(model: str, length: int, pins: tuple[str, ...] = ()) -> SearchRequest:
    settings = [f"batch.sequence_length={length}", "batch.global_sequences=8"]
    return make_request(model, cluster="8xh100", settings=settings, pins=pins)


@pytest.mark.quick("mixtral-8x7b-4096", "llama3-8b-8192", "gpt2-xl-1024")
@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("gpt2-xl", 1024),
        ("llama3-8b", 1024),
        ("llama3-8b", 8192),
        ("llama3-70b", 4096),
        ("mixtral-8x7b", 4096),
        ("mixtral-8x7b", 32768),
        ("deepseek-v3", 4096),
    ],
)
def test_each_keeps_less_and_takes_longer_than_the_one_before(name: str, length: int) -> None:
    request = _request(name, length)
    options = recompute_options(request)
    assert options[0] == RecomputeOption(0, 0.0)
    assert options[-1] == RecomputeOption(1, 1.0)
    # A block of a device, as it is when nothing else takes part.
    work = replace(cost_inputs_from_plan(request.one_rank_run), layout=LayoutNumbers())
    kept, seconds = [], []
    for option in options:
        layout = replace(work.layout, **option.numbers)
        one = replace(work, layout=layout)
        kept.append(float(fullest_rank_bytes(one).terms["activations"]))
        seconds.append(float(step_seconds(one).terms["recompute"]))
    assert all(later < earlier for earlier, later in pairwise(kept))
    assert seconds == sorted(seconds)


def test_attention_comes_before_whole_blocks_where_sequences_are_short() -> None:
    short = recompute_options(_request("llama3-8b", 2048))
    assert short[2].operators == EARLY
    assert not short[2].every
    long = recompute_options(_request("qwen3-8b", 16384))
    by_itself = [one.operators for one in long if not one.every]
    assert EARLY not in by_itself
    assert by_itself[-1] == ("norm", "mlp", "attention")


def test_what_is_pinned_is_all_that_is_tried() -> None:
    pinned = recompute_options(_request("llama3-8b", 8192, ("recompute=full/2",)))
    assert pinned == ((2, 0.5, ()),)
    chosen = recompute_options(_request("llama3-8b", 8192, ("recompute=none,selective",)))
    assert chosen[0] == (0, 0.0, ())
    assert all(one.operators and not one.every for one in chosen[1:])


def test_models_have_the_operators_that_their_blocks_have() -> None:
    experts = {name for one in recompute_options(_request("mixtral-8x7b", 4096)) for name in one[2]}
    assert experts == {"norm", "attention"}
    latent = {name for one in recompute_options(_request("deepseek-v3", 4096)) for name in one[2]}
    assert "attention" not in latent


def test_operators_are_flags_of_the_formulas() -> None:
    assert redone_numbers(("norm", "attention")) == {
        "redone_norm": 1.0,
        "redone_activation": 0.0,
        "redone_mlp": 0.0,
        "selective": 1.0,
    }
