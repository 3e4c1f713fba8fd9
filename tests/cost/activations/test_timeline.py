"""Formulas of activations: one plan, arrays of plans, and the terms of a peak."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echelon.core.plan import Plan, Recompute
from echelon.cost.activations.numbers import (
    OperatorMemory,
    SavedTensor,
    activation_numbers_from_plan,
)
from echelon.cost.activations.timeline import (
    RankActivations,
    backward_moments,
    forward_moments,
)
from echelon.cost.activations.units import UnitOperators
from echelon.layout.buckets import UNIT_HEAD
from tests.parallel.layouts import DEEPSEEK, GPT2, NANO, plan_of
from tests.parallel.pipeline.pipelines import pipeline_plan

PLANS = {
    "dense": plan_of(),
    "sequence parallel": plan_of(tp=2, sequence_parallel=True, dtype="bf16"),
    "context": plan_of(cp=2, model=GPT2),
    "experts": plan_of(model=DEEPSEEK, dp_shard=2, ep=2),
    "zero bubble": pipeline_plan("zb-h1", 2),
    "on the host": plan_of(recompute=Recompute(policy="full", offload="host")),
}


@pytest.mark.parametrize("plan", list(PLANS.values()), ids=list(PLANS))
def test_the_peak_is_no_less_than_what_is_kept(plan: Plan) -> None:
    for rank in range(plan.mesh.world_size):
        told = list(RankActivations(plan, rank).actions())
        assert [one.action for one in told] == list(RankActivations(plan, rank).row)
        assert all(one.peak >= one.kept for one in told)
        # What is left when all has run backward: numbers of each loss.
        x = activation_numbers_from_plan(plan)
        assert told[-1].kept in (0, plan.num_microbatches * x.statistics_bytes)


def forward_peak(units: Sequence[UnitOperators]) -> float:
    """Return the most that is there in a forward pass."""
    return max((float(moment.bytes) for moment in forward_moments(units, X)), default=0.0)


def backward_peak(units: Sequence[UnitOperators], *, split: bool) -> float:
    """Return the most that is there in a backward pass; `split`: weight gradients wait for W."""
    return max(
        (float(moment.bytes) for moment in backward_moments(units, X, split=split)), default=0.0
    )


def test_stored_inputs_wait_on_the_host() -> None:
    plan = PLANS["on the host"]
    x, units = activation_numbers_from_plan(plan), RankActivations(plan, 0).units(0, 0)
    stored = [unit.stored.bytes for unit in units if unit.stored is not None and unit.on_host]
    assert stored == NANO.layers * [x.stream]
    assert all(unit.saved == () for unit in units if unit.on_host)


X = activation_numbers_from_plan(plan_of())


def _kept(size: int) -> tuple[SavedTensor, ...]:
    return (SavedTensor(operator="one", name="input", bytes=size, formula="n"),)


def _operator(saved: int, forward: int, backward: int, waits: int = 0) -> OperatorMemory:
    return OperatorMemory(
        name="one",
        saved=_kept(saved),
        kept_for_weight_gradient=_kept(waits),
        forward=forward,
        backward=backward,
        backward_split=backward,
    )


def _unit(*operators: OperatorMemory, name: str = UNIT_HEAD) -> UnitOperators:
    return UnitOperators(name=name, operators=operators)


def test_forward_what_operators_keep_adds_up() -> None:
    one = _unit(_operator(10, 30, 0), _operator(20, 25, 0))
    # 30 with the first; 10 + 25 with the second; 30 in the end.
    assert forward_peak([one]) == 35
    assert forward_peak([one, _unit(_operator(1, 2, 0))]) == 35
    assert forward_peak([one, _unit(_operator(1, 9, 0))]) == 39
    assert forward_peak([]) == 0


def test_backward_it_goes_again_or_waits_for_w() -> None:
    one = _unit(_operator(10, 0, 40, waits=7), _operator(20, 0, 15, waits=12))
    # 30 + 15 of the second; then 10 + 40, and in B what the second keeps for W.
    assert backward_peak([one], split=False) == 50
    assert backward_peak([one], split=True) == 62


def test_a_recomputed_unit_keeps_its_input_alone_and_runs_forward_again() -> None:
    operators = (_operator(int(X.stream), 3000, 0), _operator(2000, 2500, 100))
    stored = UnitOperators(
        name="layers.0",
        operators=operators,
        stored=SavedTensor(operator="layers.0", name="input", bytes=X.stream, formula="n D s"),
    )
    whole = UnitOperators(name="layers.0", operators=operators)
    assert stored.saved == (stored.stored,)
    assert forward_peak([stored, stored]) < forward_peak([whole, whole])
    # Backward it has all that its operators keep, once.
    again, once = (backward_peak([unit], split=False) for unit in (stored, whole))
    assert again >= once


@pytest.mark.parametrize("split", [False, True])
def test_a_unit_without_operators_hands_its_gradient_on(split: bool) -> None:
    stored = SavedTensor(operator="stage", name="input", bytes=X.stream, formula="n D s")
    alone = UnitOperators(name="input", operators=(), stored=stored)
    assert forward_peak([alone]) == X.stream
    assert backward_peak([alone], split=split) == 3 * X.stream
