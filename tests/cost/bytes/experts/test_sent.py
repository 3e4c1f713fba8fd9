"""Bytes that experts send, by hand for a few rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts
from echelon.layout.expert_load import (
    balanced_rows,
)
from tests.cost.bytes.experts.mixtures import (
    AUX,
    BY_SEQUENCE,
    FOUR,
    PIECES,
    TIGHT,
    terms,
)
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of


def test_tensor_ranks_with_whole_experts_gather_outputs() -> None:
    plan = plan_of(model=FOUR, tp=2, ep=2, microbatches=1)
    stream, found = 8 * 16 * 8, terms(plan, 0)
    # Attention sums its output, and its gradient; a mixture has no dense MLP.
    assert found["tp", "blocks forward"] == found["tp", "blocks backward"] == stream
    assert found["tp", "outputs of experts forward"] == stream // 2
    assert found["tp", "outputs of experts backward"] == stream // 2
    assert balanced_rows(plan, 2).leaving == 4


def test_a_scattered_stream_is_dispatched_as_it_is() -> None:
    plan = plan_of(model=FOUR, tp=2, ep=2, microbatches=1, sequence_parallel=True)
    assert not any("experts" in name for axis, name in terms(plan, 0) if axis == "tp")


@pytest.mark.parametrize("scattered", [False, True])
def test_experts_in_pieces_get_the_rows_of_all_tensor_ranks(scattered: bool) -> None:
    plan = plan_of(
        model=FOUR,
        tp=2,
        dp_shard=2,
        ep=2,
        microbatches=1,
        experts=PIECES,
        sequence_parallel=scattered,
    )
    stream, found = 8 * 16 * 8, terms(plan, 0)
    # A sum of all rows costs what gathering and scattering them does.
    assert found["tp", "rows and outputs of experts forward"] == stream
    assert found["tp", "rows and outputs of experts backward"] == stream
    assert found["tp", "choices and gates forward"] == 4 * 2 * (8 + 8)
    assert found["tp", "choices and gates backward"] == 4 * 2 * 8
    assert balanced_rows(plan, 2).leaving == 8


def test_a_shared_expert_is_a_dense_mlp() -> None:
    shared = replace(FOUR, experts=Experts(num_experts=4, top_k=2, ffn=12, shared_experts=1))
    without, beside = (terms(plan_of(model=m, tp=2, ep=2), 0) for m in (FOUR, shared))
    stream = 8 * 16 * 8
    assert beside["tp", "blocks forward"] - without["tp", "blocks forward"] == 2 * stream
    assert beside["tp", "blocks backward"] - without["tp", "blocks backward"] == 2 * stream


def test_what_is_decided_by_sequence() -> None:
    changes: dict[str, Any] = {"model": FOUR, "cp": 2, "tp": 2, "microbatch_sequences": 2}
    changes |= {"microbatches": 1, "dtype": "fp32"}

    def sent(balance: Balance) -> dict[str, int]:
        found = terms(plan_of(**changes, balance=balance), 0)
        return {name: size for (axis, name), size in found.items() if axis == "sequence"}

    assert sent(AUX) == {}
    # Four ranks add up the counts of two sequences, or of the microbatch.
    assert sent(BY_SEQUENCE) == {"counts of sequences": 2 * 3 * (2 * 4 * 8) // 4}
    by_microbatch = replace(AUX, aux_over="microbatch")
    assert sent(by_microbatch) == {"counts of sequences": 2 * 3 * (4 * 8) // 4}
    # Each has 2 x 8 / 4 rows: a key and two choices.
    choices = 3 * 4 * 3 * 8
    assert sent(TIGHT) == {"choices of sequences": choices}
    by_score = replace(TIGHT, drop="score")
    assert sent(by_score) == {
        "choices of sequences": choices,
        "gates of sequences": 3 * 4 * 2 * 4,
    }


def test_a_stage_adds_up_what_its_layers_noted() -> None:
    plan = plan_of(model=DEEPSEEK, dp_shard=2, pp=2, ep=2)
    row = (2 * 8 + 3) * 8
    # The block of the first stage is dense.
    assert ("stage", "routing of a step") not in terms(plan, 0)
    assert terms(plan, 2)["stage", "routing of a step"] == 2 * row // 2
    both = plan_of(
        model=replace(MIXTRAL, layers=4),
        pp=2,
        dp_shard=2,
        ep=2,
        schedule="dualpipe",
        microbatches=4,
    )
    assert terms(both, 0)["pp", "routing of a step"] == 4 * row
