"""Forward passes alone: every one once, in an order that runs and fills the pipeline."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.deadlock import send_window
from echelon.schedule.from_plan import forward_only
from echelon.schedule.messages import ScheduleMessages, run_action_lists
from echelon.schedule.simulate import Durations, simulate
from tests.schedule.examples import runnable_schedules, schedule_of

NAMES = sorted(SCHEDULES)


def _slots(name: str, p: int, v: int, m: int) -> float:
    kind = SCHEDULES[name]
    schedule = build_schedule(
        name,
        num_stages=kind.stages_for(p, v),
        num_ranks=p,
        num_microbatches=kind.minimum_microbatches(p),
    )
    only = forward_only(schedule, m)
    assert only.stage_ranks == schedule.stage_ranks
    return simulate(only, Durations.uniform(only.num_stages)).makespan_s


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 9, 16, 19])
def test_an_evaluation_takes_as_long_as_it_must(name: str, m: int) -> None:
    p, v = 4, SCHEDULES[name].default_virtual_stages
    if name in ("zb-v", "dualpipe-v"):
        expected = 2 * m + 2 * (p - 1)
    elif name == "dualpipe":
        expected = m + p - 1 - (m % 2 == 0)
    else:
        expected = v * m + (p - 1) + (v - 1) * max(0, p - m)
    assert _slots(name, p, v, m) == expected


@given(runnable_schedules, st.integers(1, 9))
def test_every_forward_pass_runs_once_wherever_the_stages_are(schedule: object, m: int) -> None:
    only = forward_only(schedule, m)  # type: ignore[arg-type]
    assert Counter(run_action_lists(only)[0]) == Counter(
        Action(ActionKind.F, stage, microbatch)
        for stage in range(only.num_stages)
        for microbatch in range(m)
    )
    for rank, row in enumerate(only.actions):
        assert all(only.rank_of(action.stage, action.microbatch) == rank for action in row)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_where_sends_wait_for_their_receives(name: str) -> None:
    p, kind = 4, SCHEDULES[name]
    schedule = build_schedule(
        name,
        num_stages=kind.stages_for(p, kind.default_virtual_stages),
        num_ranks=p,
        num_microbatches=2 * p,
    )
    for m in (1, 3, 8):
        only = forward_only(schedule, m)
        traffic = ScheduleMessages.from_schedule(only)
        assert all(len(posted) <= 1 for row in traffic.receives for posted in row)
        assert send_window(traffic) <= m


def test_every_second_microbatch_is_mirrored_where_some_are_in_training() -> None:
    dual = build_schedule("dualpipe", num_stages=2, num_ranks=2, num_microbatches=4)
    only = forward_only(dual, 5)
    assert only.mirrored == (1, 3)
    assert forward_only(dual, 1).mirrored == ()
    assert [" ".join(map(str, row)) for row in only.actions] == [
        "F0.0 F1.1 F0.2 F1.3 F0.4",
        "F0.1 F1.0 F0.3 F1.2 F1.4",
    ]


def test_a_rank_with_stages_side_by_side_finishes_what_it_began() -> None:
    schedule = schedule_of("F0.0 F1.0 BW1.0 BW0.0", num_microbatches=1, stage_ranks=(0, 0))
    (row,) = forward_only(schedule, 2).actions
    assert " ".join(map(str, row)) == "F0.0 F1.0 F0.1 F1.1"
