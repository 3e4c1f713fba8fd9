"""Few rounds of a pipeline are as full as many, or all of them are walked."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.peak.few_rounds import (
    ROUNDS,
    most_in_flight,
    with_as_full_ranks,
    with_few_microbatches,
)
from echelon.schedule.from_plan import schedule_from_plan


def plan_of(schedule: str, count: int) -> Plan:
    flags = (
        "mesh.pp=4",
        "model.layers=8",
        f"pipeline.schedule={schedule}",
        f"batch.global_sequences={count}",
        "batch.microbatch_sequences=1",
    )
    return load_job("nano", flags).plan


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_what_is_left_after_whole_rounds_is_kept(extra: int) -> None:
    assert with_few_microbatches(plan_of("1f1b", 40 + extra)).num_microbatches == 4 * ROUNDS + extra
    assert with_few_microbatches(plan_of("1f1b", 5)).num_microbatches == 5


def test_schedules_that_begin_with_all_microbatches_are_walked_whole() -> None:
    short, whole = plan_of("1f1b", 40), plan_of("gpipe", 40)
    assert with_as_full_ranks(short).num_microbatches == 8
    assert with_as_full_ranks(whole) is whole
    assert most_in_flight(schedule_from_plan(short)) == [4, 3, 2, 1]
    assert most_in_flight(schedule_from_plan(whole)) == [40] * 4
