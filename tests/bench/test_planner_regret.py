"""The bench of the planner on this machine: which plans, how they are timed and judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.planner_regret import Measured, drawn_plans, planned, regret, summary, text
from echelon.api.calibrating.measuring import SMALL, plan_of_split, step_s
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.cost.fit.runs import plan_label
from echelon.launch.local.supervisor import RankPool

WIDTH = 80


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Return four ranks of processors."""
    return load_job("nano", ['cluster.preset="4xcpu"', "mesh.dp_replicate=4"]).plan.cluster


def test_drawn_plans_are_distinct_legal_and_the_same_for_a_seed(cluster: Cluster) -> None:
    plans = drawn_plans(cluster, 12, seed=3)
    names = [plan_label(plan) for plan in plans]
    assert len(set(names)) == 12
    assert names == [plan_label(plan) for plan in drawn_plans(cluster, 12, seed=3)]
    for plan in plans:
        assert plan.mesh.world_size == plan.cluster.num_devices <= 4


def test_the_planner_adds_plans_of_every_size(cluster: Cluster) -> None:
    found = [plan for world in (1, 4) for plan in planned(cluster, world, 2)]
    assert [plan.mesh.world_size for plan in found] == [1, 1, 4, 4]


def test_regret_is_what_the_chosen_plan_takes_more(cluster: Cluster) -> None:
    plans = drawn_plans(cluster, 4, seed=5)
    told = ((1.1, 1.0, True), (0.9, 1.2, True), (2.0, 2.0, True), (3.0, 4.0, False))
    rows = [
        Measured(plan=plan, predicted_s=predicted, measured_s=measured, drawn=drawn)
        for plan, (predicted, measured, drawn) in zip(plans, told, strict=True)
    ]
    assert regret(rows) == pytest.approx(0.2)
    found = summary(rows)
    assert found.mean == pytest.approx((0.1 + 0.25 + 0.0) / 3)
    assert found.median == pytest.approx(0.1)
    assert found.worst == pytest.approx(0.25)
    assert found.in_order == pytest.approx(2 / 3)
    assert len(found.missed) == 3
    right = [replace(one, predicted_s=one.measured_s) for one in rows]
    assert summary(right).missed == []
    lines = text(rows).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert sum(" * " in line for line in lines) == 1


def test_steps_are_timed_on_the_ranks_of_a_plan(cluster: Cluster, rank_pool: RankPool) -> None:
    plan = plan_of_split((SMALL, {"mesh.tp": 2}), cluster)
    assert step_s(rank_pool, plan, warmup=0, steps=1) > 0.0
