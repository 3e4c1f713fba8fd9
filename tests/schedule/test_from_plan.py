"""The schedule of a plan, where its stages lie, and what crosses between ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from echelon.core.plan import Plan
from echelon.schedule.action import ActionKind
from echelon.schedule.build import build_schedule
from echelon.schedule.from_plan import (
    messages_from_plan,
    num_microbatches_on_stage,
    placement,
    schedule_from_plan,
    schedule_from_rows,
    stage_placement_from_plan,
)
from echelon.schedule.messages import Payload, ScheduleMessages
from tests.parallel.layouts import plan_of
from tests.parallel.pipeline.pipelines import pipeline_plan

ROWS = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1")


def counted(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the activations and gradients that a rank sends, one by one."""
    channels = ScheduleMessages.from_schedule(schedule_from_plan(plan)).channels
    sent = [one for (source, _), some in channels.items() if source == rank for one in some]
    activations = sum(one.payload is Payload.ACTIVATION for one in sent)
    return activations, len(sent) - activations


@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipe", 1)]
)
def test_a_plan_that_names_a_schedule_has_what_its_builder_builds(name: str, virtual: int) -> None:
    plan = pipeline_plan(name, 2)
    built = build_schedule(
        name, num_stages=2 * virtual, num_ranks=2, num_microbatches=plan.num_microbatches
    )
    assert schedule_from_plan(plan) == built
    where = stage_placement_from_plan(plan)
    assert where.actions == ()
    assert (where.stage_ranks, where.mirrored) == (built.stage_ranks, built.mirrored)
    for rank in range(2):
        sent = messages_from_plan(plan, rank)
        assert tuple(map(Counter.total, sent)) == counted(plan, rank)
        for stage in where.stages_of(rank):
            own = [one for one in built.actions[rank] if one.stage == stage]
            forward = sum(one.kind is ActionKind.F for one in own)
            assert num_microbatches_on_stage(plan, rank, stage) == forward


def test_what_the_ranks_of_1f1b_send() -> None:
    plan = pipeline_plan("1f1b", 4)
    m = plan.num_microbatches
    assert [messages_from_plan(plan, rank) for rank in range(4)] == [
        ({1: m}, {}),
        ({2: m}, {0: m}),
        ({3: m}, {1: m}),
        ({}, {2: m}),
    ]


def test_rows_say_who_owns_a_stage() -> None:
    plan = plan_of(pp=2, schedule="file", rows=ROWS)
    schedule = schedule_from_plan(plan)
    assert [" ".join(map(str, row)) for row in schedule.actions] == list(ROWS)
    assert schedule == schedule_from_rows("file", ROWS)
    assert stage_placement_from_plan(plan).stage_ranks == (0, 1)
    assert schedule_from_rows("file", ROWS[::-1]).stage_ranks == (1, 0)
    with pytest.raises(ValueError, match="'F0' is not an action"):
        schedule_from_rows("file", ("F0",))


def test_a_placement_is_there_for_numbers_that_no_builder_takes() -> None:
    where = placement("dualpipe", num_stages=4, num_ranks=4, num_microbatches=2)
    assert where.stage_ranks == (0, 1, 2, 3)
    assert where.mirrored == (1,)
