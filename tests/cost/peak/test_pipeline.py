"""Few rounds of a pipeline are as full as many, or all of them are walked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.peak.rank_peak import (
    ROUNDS,
    message_counts,
    most_in_flight,
    with_as_full_ranks,
    with_few_microbatches,
)
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import RECEIVES_AHEAD


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


def pipeline_plan(*flags: str) -> Plan:
    return load_job("nano", ("model.layers=8", *flags)).plan


def test_the_first_stage_receives_gradients_ahead_and_keeps_what_leaves() -> None:
    plan = pipeline_plan("mesh.pp=2", "batch.global_sequences=4", "batch.microbatch_sequences=1")
    first, second = message_counts(plan)
    row = [str(action) for action in schedule_from_plan(plan).actions[0]]
    assert row[:4] == ["F0.0", "F0.1", "BW0.0", "F0.2"]
    # F0.0: the gradient of BW0.0 is expected; F0.1: an activation leaves, too.
    assert first[:2] == (1, 2)
    # The second stage has posted the activations of its first actions, and taken one.
    assert second[0] == 1
    assert max(second) <= 2 * RECEIVES_AHEAD + 1


def test_what_stays_on_a_rank_is_a_message_until_it_is_taken() -> None:
    flags = ("mesh.pp=2", "pipeline.schedule=zb-v")
    plan = pipeline_plan(*flags)
    rows = message_counts(plan)
    schedule = schedule_from_plan(plan)
    assert [len(row) for row in rows] == [len(row) for row in schedule.actions]
    assert all(count >= 0 for row in rows for count in row)
    # The last rank of a V hands its activations to itself.
    assert max(rows[1]) >= 1


def test_schedules_of_a_file_are_counted_too() -> None:
    plan = pipeline_plan("mesh.pp=2")
    words = [" ".join(map(str, row)) for row in schedule_from_plan(plan).actions]
    pipeline = replace(plan.layout.pipeline, rows=tuple(words))
    listed = replace(plan, layout=replace(plan.layout, pipeline=pipeline))
    assert message_counts(listed) == message_counts(plan)
