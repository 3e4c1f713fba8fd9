"""List scheduling ends under any urgency, in either direction, within any memory that suffices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from echelon.schedule.list_scheduling import ListScheduler
from echelon.schedule.simulate import Durations
from echelon.schedule.timer import ScheduleTimer
from tests.schedule.examples import SEEDS
from tests.schedule.search_cases import Case, cases, is_within, random_rows


@given(cases, SEEDS)
def test_any_urgency_gives_a_legal_schedule_within_memory(case: Case, seed: int) -> None:
    scheduler, rows = random_rows(case, seed)
    assert is_within(scheduler, rows)


@pytest.mark.parametrize(("patience", "expected"), [(0.0, "W0.0 B0.1"), (1.0, "B0.1 W0.0")])
def test_a_patient_rank_waits_for_a_more_urgent_action(patience: float, expected: str) -> None:
    durations = replace(Durations.uniform(2, transfer_s=0.25), weight_gradient_s=(2.0, 2.0))
    clock = ScheduleTimer((0, 1), 2, durations)
    lanes = (0.0, -1.0, 1.0, -1.0)  # F, B, W, BW
    urgency = [lanes[code // (2 * 2)] for code in range(len(clock.duration_of))]
    rows = ListScheduler(clock, (2, 2)).build(urgency, [[True] * 2] * 2, patience=patience)
    # rank 0 ends B0.0 at 4.5, a W would take it to 6.5, and the next gradient arrives at 5.5
    words = " ".join(str(clock.action_of(code)) for code in rows[0])
    assert words == f"F0.0 F0.1 B0.0 {expected} W0.1"
