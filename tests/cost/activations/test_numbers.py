"""The letters of the formulas, for one plan and for arrays of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echelon.cost.activations.attention import attention_operators
from echelon.cost.activations.linear import mlp_operators
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    OperatorMemory,
    activation_numbers_from_plan,
    saved_tensors,
    total_saved_bytes,
)
from echelon.cost.activations.units import head_operators
from tests.parallel.layouts import NANO, plan_of


def test_one_formula_serves_numbers_and_arrays() -> None:
    plans = [
        plan_of(dtype="fp32"),
        plan_of(tp=2, dtype="bf16", sequence_parallel=True, tp_overlap="ring"),
        plan_of(microbatch_sequences=2),
    ]
    each = [activation_numbers_from_plan(plan) for plan in plans]
    names = ActivationNumbers.__dataclass_fields__
    # Of adapters there is a number for each group of layers, each of them an array of plans.
    stacked: dict[str, Any] = {
        name: np.array([getattr(one, name) for one in each]).T for name in names
    }
    together = ActivationNumbers(**stacked)
    for make in (attention_operators, mlp_operators, head_operators):
        for place, one in enumerate(each):
            for alone, many in zip(make(one), make(together), strict=True):
                for name in (
                    "saved_bytes",
                    "weight_gradient_bytes",
                    "forward",
                    "backward",
                    "backward_split",
                ):
                    found = np.broadcast_to(getattr(many, name), 3)[place]
                    assert found == getattr(alone, name), (alone.name, name)


def test_sizes_of_a_plan_by_hand() -> None:
    x = activation_numbers_from_plan(plan_of(tp=2, sequence_parallel=True, dtype="bf16"))
    assert (x.tokens, x.rows, x.heads, x.kv_heads, x.inner, x.vocab) == (8, 4, 2, 1, 12, 19)
    assert (x.stream, x.whole, x.queries, x.keys) == (128, 256, 8 * 2 * 4 * 2, 8 * 4 * 2)
    assert (x.shared, x.scattered, x.low_precision, x.statistics_bytes) == (1, 1, 1, 4)
    alone = activation_numbers_from_plan(plan_of(dtype="fp64"))
    assert (alone.shared, alone.scattered, alone.low_precision) == (0, 0, 0)
    assert alone.statistics_bytes == 8


def test_so_many_rows_are_widened_as_fit_the_cache() -> None:
    x = activation_numbers_from_plan(plan_of())
    assert x.chunk_rows(10, 2**10) == 10
    assert x.chunk_rows(10**6, 2**10) == 2**8


@pytest.mark.parametrize(("tp", "chunks"), [(2, 1), (4, 2)])
def test_of_gathered_rows_a_ring_has_two_chunks_at_most(tp: int, chunks: int) -> None:
    model = replace(NANO, heads=8, kv_heads=4, head_dim=2)
    plans = {
        kind: plan_of(model=model, tp=tp, sequence_parallel=True, tp_overlap=kind, dtype="fp32")
        for kind in ("none", "ring", "symmetric-memory")
    }
    x = {kind: activation_numbers_from_plan(plan) for kind, plan in plans.items()}
    chunk = x["none"].stream
    assert x["none"].whole == tp * chunk
    assert x["ring"].gathered_bytes(tp * chunk) == chunks * chunk
    # A part is made while one leaves and one comes; the sum alone is left before the next gather.
    assert x["ring"].summed_bytes(tp * chunk) == 3 * chunk
    assert x["ring"].left_early(tp * chunk) == 2 * chunk
    for kind, early in (("none", 0), ("symmetric-memory", tp * chunk)):
        assert x[kind].gathered_bytes(tp * chunk) == tp * chunk
        assert x[kind].summed_bytes(tp * chunk) == (tp + 1) * chunk
        assert x[kind].left_early(tp * chunk) == early


def test_whole_rows_are_not_gathered() -> None:
    x = activation_numbers_from_plan(plan_of(tp=2))
    assert (x.gathered_bytes(x.whole), x.summed_bytes(x.whole)) == (0, x.whole)


def test_what_an_operator_keeps_is_the_sum_of_its_tensors() -> None:
    kept = saved_tensors("norm", ("stream", 12, "n D s"), ("statistics", 4, "n w"))
    assert [one.operator for one in kept] == ["norm", "norm"]
    assert total_saved_bytes(kept) == 16
    operator = OperatorMemory(name="norm", saved=kept, kept_for_weight_gradient=kept[:1])
    assert (operator.saved_bytes, operator.weight_gradient_bytes, operator.remade_bytes) == (
        16,
        12,
        0,
    )
