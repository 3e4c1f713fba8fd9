"""What a mesh leaves open: ways to share out, and schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from echelon.core.plan import Precision
from echelon.cost.inputs.numbers import LayoutNumbers
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.step import step_seconds
from echelon.planner.search.options import (
    EXACT,
    NodeOfRanks,
    RecomputeOption,
    Rounding,
    ZeroOption,
    pinned_zero_options,
    recompute_options,
    redone_numbers,
    rounding_options,
    schedule_options,
    zero_options,
)
from echelon.planner.search.pins import Pins
from echelon.planner.search.request import SearchRequest, make_request


def test_two_data_ranks_are_replicas_or_share_out() -> None:
    assert zero_options(2, 1, 1, 1, offload=False) == (
        ZeroOption(0, 2, 1),
        ZeroOption(1, 1, 2),
        ZeroOption(2, 1, 2),
        ZeroOption(3, 1, 2),
        ZeroOption(3, 1, 2, reshard=0),
    )
    assert zero_options(1, 1, 1, 1, offload=False) == (ZeroOption(0, 1, 1),)
    assert zero_options(1, 1, 1, 1, offload=True) == (
        ZeroOption(1, 1, 1, offload=1),
        ZeroOption(2, 1, 1, offload=1),
    )


def test_pins_leave_what_they_let_through_and_units_are_gathered_twice_unpinned() -> None:
    found = pinned_zero_options(Pins(), (2, 1, 1, 1), offload=False)
    assert all(one.reshard for one in found)
    pins = Pins().having("zero", 3).having("reshard", 0)
    assert pinned_zero_options(pins, (2, 1, 1, 1), offload=False) == (ZeroOption(3, 1, 2, 0),)


def test_one_rank_has_one_order_and_two_have_several() -> None:
    (alone,) = schedule_options(Pins(), 1, 8)
    assert (alone.name, alone.virtual, alone.allows(1)) == ("1f1b", 1, True)
    assert schedule_options(Pins().having("virtual", 2), 1, 8) == ()
    several = schedule_options(Pins(), 2, 8)
    assert {"1f1b", "interleaved-1f1b", "zb-h1"} <= {one.name for one in several}
    (gpipe,) = [one for one in several if one.name == "gpipe"]
    assert gpipe.allows(1)
    assert not gpipe.allows(8), "1f1b waits as much and holds less"
    assert all(one.virtual * 2 <= 8 for one in several)


def test_one_rank_needs_no_schedule_that_a_trainer_has() -> None:
    (alone,) = schedule_options(Pins(limits={"schedule": ("gpipe",)}), 1, 8)
    assert alone.name == "1f1b"
    assert schedule_options(Pins().having("schedule", "gpipe"), 1, 8) == ()


def test_nodes_keep_slices_where_each_holds_several_of_the_ranks_and_none_all() -> None:
    node = NodeOfRanks(devices=8, tp=2)
    kept = [one for one in zero_options(16, 1, 1, 2, offload=False, node=node) if one.secondary]
    assert kept == [
        ZeroOption(3, 2, 8, secondary=1),
        ZeroOption(3, 1, 16, secondary=1),
    ]
    for alone in (NodeOfRanks(devices=8, tp=8), NodeOfRanks(devices=8, tp=3), NodeOfRanks()):
        options = zero_options(16, 1, 1, 2, offload=False, node=alone)
        assert not any(one.secondary for one in options)


def test_what_rounds_is_there_only_where_it_can_be_had() -> None:
    gathers, sums = Rounding(gather="int8", int8_block=128), Rounding(reduce="int8")
    node, key = NodeOfRanks(devices=2), (4, 1, 1, 1)
    exact = pinned_zero_options(Pins(), key, offload=False, node=node)
    assert {one.rounding for one in exact} == {EXACT}
    both = pinned_zero_options(Pins(), key, offload=False, node=node, roundings=[gathers, sums])
    assert {one.zero for one in both if one.rounding == gathers} == {3}
    assert {(one.zero, one.dp_shard) for one in both if one.rounding == sums} == {
        (1, 4),
        (2, 4),
        (3, 4),
    }


def test_nothing_is_rounded_where_nobody_says_so() -> None:
    assert rounding_options(Pins(), Precision()) == (EXACT,)
    assert EXACT.settings() == {}


def test_every_pinned_value_goes_with_every_other() -> None:
    pins = Pins().having("gather", "parameters", "int8").having("reduce", "int4")
    plain, rounded = rounding_options(pins, Precision(parameters="bf16"))
    # A scale of 4 bytes for 128 numbers, of half a byte in sums.
    assert plain == Rounding(reduce="int4", summed_bytes=0.5 + 4 / 128)
    assert rounded.settings() == {
        "zero.gather": "int8",
        "zero.int8_block": 128,
        "zero.reduce": "int4",
    }
    assert (rounded.gathered_bytes, rounded.gathers_ends) == (1 + 4 / 128, 1.0)


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
