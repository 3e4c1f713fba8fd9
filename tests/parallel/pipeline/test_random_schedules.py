"""Whatever the checker accepts ends on ranks, with the numbers of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.schedule.action import Schedule
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from tests.parallel import one_device, targets
from tests.parallel.layouts import cut, plan_of
from tests.parallel.pipeline.pipelines import EIGHT
from tests.schedule.examples import mirrored_schedules, runnable_schedules
from tests.walks import examples


@settings(
    deadline=None,
    max_examples=examples(15),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(runnable_schedules | mirrored_schedules, st.booleans())
def test_a_run_of_any_accepted_schedule_ends(
    rank_pool: RankPool, schedule: Schedule, tied: bool
) -> None:
    # A tied embedding on three or four ranks is refused.
    ends = schedule.stage_ranks[0] + schedule.stage_ranks[-1]
    tied = tied and (not schedule.mirrored or ends == schedule.num_ranks - 1)
    plan = _plan(schedule, tied=tied)
    assert schedule_from_plan(plan).actions == schedule.actions
    check_schedule(schedule_from_plan(plan))
    whole = _alone(schedule.num_microbatches, tied=tied)
    ranks = rank_pool.run(targets.train, (plan, 1), world_size=schedule.num_ranks)
    values: one_device.Values = {}
    for row, rank in zip(schedule.actions, ranks, strict=True):
        done = [event.name for event in rank.events[0] if event.kind in ("F", "B", "W", "BW")]
        assert done == [str(action) for action in row]
        assert rank.losses == pytest.approx([whole.loss], rel=1e-13)
        values |= {name: held[0].tensor for name, held in rank.parameters.items()}
    assert values.keys() == whole.after.keys()
    for name, value in values.items():
        assert (value - whole.after[name]).abs().max() < 1e-12, name


def _plan(schedule: Schedule, *, tied: bool) -> Plan:
    return plan_of(
        model=replace(EIGHT, tied=tied),
        pp=schedule.num_ranks,
        schedule="file",
        microbatches=schedule.num_microbatches,
        virtual_stages=schedule.num_stages // schedule.num_ranks,
        stages=cut(EIGHT.layers, schedule.num_stages),
        rows=tuple(" ".join(map(str, row)) for row in schedule.actions),
    )


@cache
def _alone(microbatches: int, *, tied: bool) -> one_device.OneStep:
    plan = plan_of(model=replace(EIGHT, tied=tied), microbatches=microbatches)
    return one_device.train(plan, 1)[0]
