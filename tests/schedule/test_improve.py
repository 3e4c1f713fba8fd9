"""Schedules that are shifted, fused and split: legal, within memory, and never longer."""

from __future__ import annotations

from hypothesis import given

from echelon.schedule.improve import (
    TimedSchedule,
    fuse_backward,
    justify,
    split_backward,
    split_cells,
)
from echelon.schedule.list_scheduling import ListScheduler
from echelon.schedule.simulate import Durations
from echelon.schedule.timer import ScheduleTimer
from tests.schedule.examples import SEEDS
from tests.schedule.search_cases import Case, cases, is_within, random_rows


@given(cases, SEEDS)
def test_justified_fused_and_split_schedules_are_legal_and_within_memory(
    case: Case, seed: int
) -> None:
    scheduler, rows = random_rows(case, seed)
    found = TimedSchedule.from_rows(scheduler.clock, rows)
    assert found is not None
    assert is_within(scheduler, justify(scheduler, found, 1.0).rows)
    joined = fuse_backward(scheduler.clock, found)
    assert joined.cost <= found.cost
    assert is_within(scheduler, joined.rows)
    apart = split_backward(scheduler.clock, rows)
    assert is_within(scheduler, apart)
    assert all(map(all, split_cells(scheduler.clock, apart)))


def _equal(p: int, m: int) -> tuple[ScheduleTimer, ListScheduler]:
    clock = ScheduleTimer(tuple(range(p)), m, Durations.uniform(p))
    return clock, ListScheduler(clock, (m,) * p)


def test_justifying_a_step_takes_the_idle_time_out_of_it() -> None:
    p, m = 4, 8
    clock, scheduler = _equal(p, m)
    late_first = [float(code % m) for code in range(len(clock.duration_of))]
    rows = scheduler.build(late_first, [[True] * m] * p, patience=0.0)
    found = TimedSchedule.from_rows(clock, rows)
    assert found is not None
    better = justify(scheduler, found, 1.0)
    assert better.timing.makespan_s < found.timing.makespan_s
