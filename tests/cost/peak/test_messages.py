"""Messages that a pipeline rank holds beside each action."""

from __future__ import annotations

from dataclasses import replace

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.peak.messages import message_counts
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import RECEIVES_AHEAD


def plan_of(*flags: str) -> Plan:
    return load_job("nano", ("model.layers=8", *flags)).plan


def test_the_first_stage_receives_gradients_ahead_and_keeps_what_leaves() -> None:
    plan = plan_of("mesh.pp=2", "batch.global_sequences=4", "batch.microbatch_sequences=1")
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
    plan = plan_of(*flags)
    rows = message_counts(plan)
    schedule = schedule_from_plan(plan)
    assert [len(row) for row in rows] == [len(row) for row in schedule.actions]
    assert all(count >= 0 for row in rows for count in row)
    # The last rank of a V hands its activations to itself.
    assert max(rows[1]) >= 1


def test_schedules_of_a_file_are_counted_too() -> None:
    plan = plan_of("mesh.pp=2")
    words = [" ".join(map(str, row)) for row in schedule_from_plan(plan).actions]
    pipeline = replace(plan.layout.pipeline, rows=tuple(words))
    listed = replace(plan, layout=replace(plan.layout, pipeline=pipeline))
    assert message_counts(listed) == message_counts(plan)
