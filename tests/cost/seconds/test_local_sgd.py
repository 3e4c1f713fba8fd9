"""Seconds of rounds: 1/H of the travel, less what a delay hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.local_sgd import outer_seconds
from echelon.cost.seconds.step import fullest_rank_weights, step_seconds

BASE = (
    "cluster.preset=16xh100",
    "mesh.dp_replicate=2",
    "mesh.dp_shard=8",
    "zero.stage=3",
    "batch.global_sequences=64",
    "optimizer.warmup_steps=0",
)


def plan_of(*sets: str) -> Plan:
    return load_job("llama3-8b-zero3", (*BASE, *sets)).plan


def outer(plan: Plan) -> float:
    return float(step_seconds(cost_inputs_from_plan(plan)).terms["outer"])


def test_a_mean_step_waits_for_one_in_h_of_a_round() -> None:
    """Evidence of row B06: seconds over dp_replicate are 1/H."""
    once, seldom = (plan_of(f"local_sgd.every={n}", "train.steps=1000") for n in (1, 50))
    assert outer(once) == pytest.approx(50 * outer(seldom), rel=1e-12)
    assert outer(once) > 0


def test_islands_sum_nothing_in_a_step() -> None:
    apart = step_seconds(cost_inputs_from_plan(plan_of("local_sgd.every=50", "train.steps=1000")))
    together = step_seconds(cost_inputs_from_plan(plan_of("train.steps=1000")))
    assert "outer" not in together.terms
    assert float(apart.terms["gradients"]) < float(together.terms["gradients"])
    assert float(apart.total) < float(together.total)


def test_what_is_late_travels_behind_steps() -> None:
    work = cost_inputs_from_plan(plan_of("local_sgd.every=50", "train.steps=1000"))
    held = fullest_rank_weights(work, work.model.layers, 0.0)
    shown = float(outer_seconds(work, held, 10.0))
    late = replace(work, layout=replace(work.layout, delay=1.0))
    hidden, rest = (float(outer_seconds(late, held, step_s)) for step_s in (10.0, 0.0))
    assert rest == pytest.approx(shown)
    assert 0 < hidden < shown
