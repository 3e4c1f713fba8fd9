"""List scheduling ends under any urgency, in either direction, within any memory that suffices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from echelon.schedule.check import check_schedule
from echelon.schedule.clock import Clock
from echelon.schedule.improve import Found, fused, justify, split_of, unfused
from echelon.schedule.list_scheduling import ListScheduler
from echelon.schedule.simulate import Durations
from tests.schedule.examples import SEEDS
from tests.schedule.search_cases import Case, cases


def _scheduler(case: Case) -> ListScheduler:
    clock = Clock(case.stage_ranks, case.num_microbatches, case.durations)
    cells = len(case.stage_ranks) * case.num_microbatches
    return ListScheduler(clock, case.most_in_flight or (cells,) * clock.num_ranks)


def _random_rows(case: Case, seed: int) -> tuple[ListScheduler, list[list[int]]]:
    rng = random.Random(seed)
    scheduler = _scheduler(case)
    clock = scheduler.clock
    urgency = [rng.random() for _ in clock.duration_of]
    split = [
        [rng.random() < 0.5 for _ in range(case.num_microbatches)] for _ in range(clock.num_stages)
    ]
    build = scheduler.backwards if rng.random() < 0.5 else scheduler.forwards
    rows = build(urgency, split, patience=rng.choice((0.0, 0.5, 1.0)))
    assert split_of(clock, rows) == split
    return scheduler, rows


def _within(scheduler: ListScheduler, rows: list[list[int]]) -> bool:
    report = check_schedule(scheduler.clock.schedule_of(rows, "any"))
    peaks = zip(report.peak_in_flight_per_rank, scheduler.limits, strict=True)
    return all(peak <= most for peak, most in peaks)


@given(cases, SEEDS)
def test_any_urgency_gives_a_legal_schedule_within_memory(case: Case, seed: int) -> None:
    scheduler, rows = _random_rows(case, seed)
    assert _within(scheduler, rows)


@given(cases, SEEDS)
def test_justified_fused_and_split_schedules_are_legal_and_within_memory(
    case: Case, seed: int
) -> None:
    scheduler, rows = _random_rows(case, seed)
    found = Found.of(scheduler.clock, rows)
    assert found is not None
    assert _within(scheduler, justify(scheduler, found, 1.0).rows)
    joined = fused(scheduler.clock, found)
    assert joined.cost <= found.cost
    assert _within(scheduler, joined.rows)
    apart = unfused(scheduler.clock, rows)
    assert _within(scheduler, apart)
    assert all(map(all, split_of(scheduler.clock, apart)))


def _equal(p: int, m: int) -> tuple[Clock, ListScheduler]:
    clock = Clock(tuple(range(p)), m, Durations.uniform(p))
    return clock, ListScheduler(clock, (m,) * p)


@pytest.mark.parametrize(("patience", "expected"), [(0.0, "W0.0 B0.1"), (1.0, "B0.1 W0.0")])
def test_a_patient_rank_waits_for_a_more_urgent_action(patience: float, expected: str) -> None:
    durations = replace(Durations.uniform(2, transfer_s=0.25), weight_gradient_s=(2.0, 2.0))
    clock = Clock((0, 1), 2, durations)
    lanes = (0.0, -1.0, 1.0, -1.0)  # F, B, W, BW
    urgency = [lanes[code // (2 * 2)] for code in range(len(clock.duration_of))]
    rows = ListScheduler(clock, (2, 2)).forwards(urgency, [[True] * 2] * 2, patience=patience)
    # rank 0 ends B0.0 at 4.5, a W would take it to 6.5, and the next gradient arrives at 5.5
    words = " ".join(str(clock.action_of(code)) for code in rows[0])
    assert words == f"F0.0 F0.1 B0.0 {expected} W0.1"


def test_justifying_a_step_takes_the_idle_time_out_of_it() -> None:
    p, m = 4, 8
    clock, scheduler = _equal(p, m)
    late_first = [float(code % m) for code in range(len(clock.duration_of))]
    rows = scheduler.forwards(late_first, [[True] * m] * p, patience=0.0)
    found = Found.of(clock, rows)
    assert found is not None
    better = justify(scheduler, found, 1.0)
    assert better.timing.makespan_s < found.timing.makespan_s
