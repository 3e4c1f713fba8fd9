"""Formulas of activations: one plan, arrays of plans, and the terms of a peak."""

from __future__ import annotations

import pytest

from echelon.core.plan import Plan, Recompute
from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.activations.timeline import RankActivations
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


def test_stored_inputs_wait_on_the_host() -> None:
    plan = PLANS["on the host"]
    x, units = activation_numbers_from_plan(plan), RankActivations(plan, 0).units(0, 0)
    stored = [unit.stored.bytes for unit in units if unit.stored is not None and unit.on_host]
    assert stored == NANO.layers * [x.stream]
    assert all(unit.saved == () for unit in units if unit.on_host)
