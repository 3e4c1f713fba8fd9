"""The schedule that is found: legal, within memory, no slower than any fixed one, repeatable."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from echelon.core.errors import InfeasiblePlan
from echelon.schedule.action import ActionKind
from echelon.schedule.automatic import (
    FoundSchedule,
    TimedSchedule,
    find_schedule,
    fuse_backward,
    justify,
    split_backward,
    split_cells,
)
from echelon.schedule.build import SCHEDULES, build_schedule, schedule_problems
from echelon.schedule.check import check_schedule
from echelon.schedule.list_scheduling import ListScheduler
from echelon.schedule.simulate import Durations, simulate
from echelon.schedule.timer import ScheduleTimer
from tests.schedule.examples import SEEDS
from tests.schedule.search_cases import Case, cases, is_within, random_rows, some_durations
from tests.walks import examples


def _found(case: Case) -> FoundSchedule:
    """Return what is found: legal, within memory, timed as the simulator times it, no slower."""
    found = find_schedule(
        case.stage_ranks,
        case.num_microbatches,
        case.durations,
        most_in_flight=case.most_in_flight,
    )
    report = check_schedule(found.schedule)
    assert found.schedule.name == "auto"
    assert found.schedule.stage_ranks == case.stage_ranks
    assert found.schedule.num_microbatches == case.num_microbatches
    if case.most_in_flight is not None:
        peaks = zip(report.peak_in_flight_per_rank, case.most_in_flight, strict=True)
        assert all(peak <= most for peak, most in peaks)
    assert simulate(found.schedule, case.durations).makespan_s == found.makespan_s
    assert found.lower_bound_s <= found.makespan_s
    assert all(found.makespan_s <= seconds for seconds in found.fixed.values())
    return found


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(cases)
def test_many_searches_find_what_is_legal_and_no_slower(case: Case) -> None:
    _found(case)


@settings(max_examples=examples(10))
@given(cases.filter(lambda case: len(case.stage_ranks) * case.num_microbatches <= 24))
def test_what_is_found_is_legal_within_memory_and_no_slower(case: Case) -> None:
    found = _found(case)
    numbers = {
        "num_stages": len(case.stage_ranks),
        "num_ranks": max(case.stage_ranks) + 1,
        "num_microbatches": case.num_microbatches,
    }
    for name in SCHEDULES:
        fits = not schedule_problems(name, **numbers)
        if fits:
            schedule = build_schedule(name, **numbers)
            fits = schedule.stage_ranks == case.stage_ranks and not schedule.mirrored
            if fits and case.most_in_flight is not None:
                peaks = check_schedule(schedule).peak_in_flight_per_rank
                pairs = zip(peaks, case.most_in_flight, strict=True)
                fits = all(peak <= most for peak, most in pairs)
            if fits:
                assert found.fixed[name] == simulate(schedule, case.durations).makespan_s
        assert (name in found.fixed) == fits


def test_the_same_times_give_the_same_schedule() -> None:
    durations = some_durations(4, random.Random(7))
    first, again = (
        find_schedule((0, 1, 2, 3), 6, durations, most_in_flight=(4, 4, 4, 4)) for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize("limit", [None, 4])
def test_equal_stages_reach_the_bound(limit: int | None) -> None:
    limits = None if limit is None else (limit,) * 4
    found = find_schedule((0, 1, 2, 3), 8, Durations.uniform(4), most_in_flight=limits)
    assert found.makespan_s == found.lower_bound_s == 3 + 3 * 8


@pytest.mark.parametrize(("transfer_s", "limit"), [(0.2, 4), (0.2, None), (0.5, 4), (0.5, 8)])
def test_it_beats_every_fixed_schedule_where_transfers_cost(
    transfer_s: float, limit: int | None
) -> None:
    limits = None if limit is None else (limit,) * 4
    durations = Durations.uniform(4, transfer_s=transfer_s)
    found = find_schedule((0, 1, 2, 3), 4, durations, most_in_flight=limits)
    assert {"naive", "gpipe", "1f1b", "zb-h1"} <= set(found.fixed)
    assert found.makespan_s < min(found.fixed.values())
    assert found.makespan_s / found.lower_bound_s < 1.01


def test_less_memory_makes_it_no_faster() -> None:
    spans = [
        find_schedule(
            (0, 1, 2, 3), 8, Durations.uniform(4, transfer_s=0.25), most_in_flight=(limit,) * 4
        ).makespan_s
        for limit in (1, 2, 4, 8)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == 8 * (2 * 4 + 1 + 6 * 0.25)


def test_backward_passes_are_split_only_where_it_pays() -> None:
    uniform = Durations.uniform(2)
    dear = replace(uniform, backward_s=(1.0, 1.0))
    found = find_schedule((0, 1), 4, dear)
    kinds = {action.kind for row in found.schedule.actions for action in row}
    assert kinds == {ActionKind.F, ActionKind.BW}
    assert found.makespan_s == found.lower_bound_s
    cheap = replace(uniform, backward_s=(1.9, 1.9))
    kinds = {
        action.kind for row in find_schedule((0, 1), 8, cheap).schedule.actions for action in row
    }
    assert kinds == set(ActionKind)


@pytest.mark.parametrize(
    ("stage_ranks", "limits", "smallest"),
    [((0, 1), (1, 0), "1"), ((0, 1, 0, 1), (1, 2), "2"), ((0, 1, 1, 0, 0, 1), (2, 2), "3")],
)
def test_a_limit_below_the_stages_of_a_rank_is_refused(
    stage_ranks: tuple[int, ...], limits: tuple[int, ...], smallest: str
) -> None:
    durations = Durations.uniform(len(stage_ranks))
    with pytest.raises(InfeasiblePlan) as refused:
        find_schedule(stage_ranks, 4, durations, most_in_flight=limits)
    (problem,) = refused.value.problems
    assert problem.rule == "schedule-search-has-memory"
    assert problem.suggestions[0] == smallest
    works = (int(smallest),) * len(limits)
    check_schedule(find_schedule(stage_ranks, 4, durations, most_in_flight=works).schedule)


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
