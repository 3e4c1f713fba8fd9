"""Rows of memory bars are what the exact formulas say of each pipeline rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.cost.peak.rank_peak import PeakWalk
from echelon.planner.view.plan_figures import memory_bars, memory_rows_from_plan
from tests.cost.layouts import zero_plan
from tests.parallel.layouts import NANO, plan_of

STATE = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize(
    "plan",
    [plan_of(pp=2, tp=2), plan_of(), zero_plan(1, dp_shard=2), zero_plan(3, dp_shard=2, pp=2)],
    ids=["pipeline", "one rank", "stage 1", "stage 3"],
)
def test_state_and_activations_of_each_rank_are_the_exact_ones(plan: Plan) -> None:
    rows = memory_rows_from_plan(plan)
    assert len(rows) == plan.mesh.pp
    for pp, (label, terms) in enumerate(rows):
        rank = plan.mesh.rank({Axis.PP: pp})
        assert label == f"stage {pp}"
        pools = bytes_held_by_pool(plan, rank)
        assert sum(terms[name] for name in STATE) == pools["device"] + pools.get("host", 0)
        assert terms == PeakWalk(plan).peak(rank).terms
        assert terms["activations"] > 0
    assert (rows[0][1]["gathered"] > 0) == (plan.layout.zero.stage == 3)


def test_ranks_that_are_alike_are_one_row() -> None:
    model = replace(NANO, layers=6)
    plan = plan_of(model=model, pp=6, schedule="gpipe")
    assert [label for label, _ in memory_rows_from_plan(plan)] == [
        "stage 0",
        "stages 1-4",
        "stage 5",
    ]


def test_rows_are_what_memory_bars_draw() -> None:
    plan = plan_of(pp=2, tp=2)
    rows = memory_rows_from_plan(plan)
    bars = memory_bars(rows, plan.cluster.device.memory_bytes)
    assert [row.total for row in bars.rows] == [sum(terms.values()) for _, terms in rows]
