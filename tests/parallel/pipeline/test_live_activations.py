"""Memory holds the activations of a microbatch from its F to its W, and nobody else's."""

from __future__ import annotations

import pytest

from echelon.core.plan import Recompute, RecomputePolicy
from echelon.launch.local.supervisor import RankPool
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from tests.parallel.pipeline import live_state as live_state_targets
from tests.parallel.pipeline.pipelines import EVERY, pipeline_plan
from tests.walks import shortened

SIZES = [(2, "none"), (2, "full"), (4, "none"), (4, "full")]


@pytest.mark.system("S19")
@pytest.mark.quick(
    "1f1b-2-full", "zb-v-2-full", "dualpipe-2-full", "interleaved-1f1b-4-none", "file-4-none"
)
@pytest.mark.parametrize(
    ("pp", "recompute"), shortened(SIZES, lambda size: size in ((2, "full"), (4, "none")))
)
@pytest.mark.parametrize("schedule", EVERY)
def test_a_rank_holds_what_its_list_says(
    rank_pool: RankPool, schedule: str, pp: int, recompute: RecomputePolicy
) -> None:
    plan = pipeline_plan(schedule, pp, recompute=Recompute(policy=recompute))
    planned = schedule_from_plan(plan)
    report = check_schedule(planned)
    for rank, life in enumerate(
        rank_pool.run(live_state_targets.record_live_state, plan, world_size=pp)
    ):
        row = planned.actions[rank]
        assert life.actions == [str(action) for action in row]
        for place, (held, expected) in enumerate(zip(life.held, _held(row), strict=True)):
            assert held == expected, f"rank {rank} after {row[place]}"
        assert life.kept_outputs == [set()] * len(row), "an output is kept for its graph"
        peak = max(len(held) for held in life.held)
        assert peak == report.peak_in_flight_per_rank[rank]


def _held(row: tuple[Action, ...]) -> list[set[tuple[int, int]]]:
    """Return, after each action, the pairs that have run F and neither BW nor W."""
    held: set[tuple[int, int]] = set()
    after: list[set[tuple[int, int]]] = []
    for action in row:
        key = (action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            held.add(key)
        elif action.kind is not ActionKind.B:
            held.remove(key)
        after.append(set(held))
    return after
