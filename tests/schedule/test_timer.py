"""The clock of the search gives what the simulator gives."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given

from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.simulate import Durations, simulate
from echelon.schedule.timer import ScheduleTimer, flatten_schedule
from tests.schedule.examples import SEEDS, ordered_schedules, runnable_schedules, schedule_of
from tests.schedule.search_cases import durations_for


@given(runnable_schedules, SEEDS)
def test_the_clock_agrees_with_the_simulator(schedule: Schedule, seed: int) -> None:
    durations = durations_for(schedule, seed)
    clock = ScheduleTimer(schedule.stage_ranks, schedule.num_microbatches, durations)
    rows = clock.rows_of(schedule)
    timing = clock.run(rows)
    result = simulate(schedule, durations)
    assert timing is not None
    assert timing.makespan_s == result.makespan_s
    starts = {event.name: event.start for event in result.events if event.kind != "send"}
    assert {str(clock.action_of(c)): timing.start_s[c] for row in rows for c in row} == starts
    assert clock.schedule_of(rows, schedule.name) == schedule


@given(runnable_schedules, SEEDS)
def test_latest_starts_are_no_earlier_than_starts_and_some_path_has_no_slack(
    schedule: Schedule, seed: int
) -> None:
    durations = durations_for(schedule, seed)
    clock = ScheduleTimer(schedule.stage_ranks, schedule.num_microbatches, durations)
    timing = clock.run(clock.rows_of(schedule))
    assert timing is not None
    latest = clock.latest_starts(timing)
    slack = [latest[code] - timing.start_s[code] for code in timing.order]
    assert min(slack) == 0
    last = {row[-1] for row in clock.rows_of(schedule)}
    assert all(
        latest[code] + clock.duration_of[code] == timing.makespan_s
        for code in last
        if clock.made_by[code] < 0
    )


@given(ordered_schedules)
def test_a_deadlock_has_no_times(schedule: Schedule) -> None:
    durations = durations_for(schedule, 0)
    clock = ScheduleTimer(schedule.stage_ranks, schedule.num_microbatches, durations)
    timing = clock.run(clock.rows_of(schedule))
    if timing is not None:
        assert timing.makespan_s == simulate(schedule, durations).makespan_s


def test_ranks_that_wait_in_a_circle_have_no_times() -> None:
    schedule = schedule_of("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1", num_microbatches=2)
    clock = ScheduleTimer(schedule.stage_ranks, 2, durations_for(schedule, 0))
    assert clock.run(clock.rows_of(schedule)) is None


RANKS, MICROBATCHES = 4, 12


def uneven(num_stages: int, seed: int) -> Durations:
    """Return durations of stages none of which is like another; transfers are free."""
    random = Random(seed)
    forward, inputs, weights = (
        tuple(random.uniform(0.5, 1.5) for _ in range(num_stages)) for _ in range(3)
    )
    return Durations(
        forward_s=forward,
        input_gradient_s=inputs,
        weight_gradient_s=weights,
        backward_s=tuple(b + w for b, w in zip(inputs, weights, strict=True)),
        transfer_s=(0.0,) * (num_stages - 1),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_lanes_take_what_the_simulation_takes(name: str) -> None:
    stages = RANKS * SCHEDULES[name].default_virtual_stages
    schedule = build_schedule(
        name, num_stages=stages, num_ranks=RANKS, num_microbatches=MICROBATCHES
    )
    lanes = flatten_schedule(schedule)
    for seed in range(3):
        durations = uneven(stages, seed)
        found = simulate(schedule, durations)
        assert lanes.makespan_s(durations) == found.makespan_s
        assert lanes.busy_s(durations) == pytest.approx(found.busy_s)
    assert [len(row) for row in lanes.rows] == [len(row) for row in schedule.actions]
