# SPDX-License-Identifier: Apache-2.0
"""Messages of a pipeline rank that are in its memory, action by action (`parallel/pipeline.py`).

A receive is posted a few actions before the one that takes it, with memory of its own; a send is
kept until the window of its channel has gone on. What goes to a stage on the same rank is kept
until that stage takes it. What an action has taken, and what it gives, is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from echelon.core.plan import Plan
from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.deadlock import send_window
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import (
    RECEIVES_AHEAD,
    SENDS_SPARE,
    Channel,
    ScheduleMessages,
)


def message_counts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return how many messages each pipeline rank holds beside each of its actions."""
    pipeline = plan.layout.pipeline
    if pipeline.rows:
        return _counts(schedule_from_plan(plan))
    return _built(pipeline.schedule, plan.num_stages, plan.mesh.pp, plan.num_microbatches)


@lru_cache(maxsize=64)
def _built(name: str, stages: int, ranks: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return those of a schedule that a builder makes: many plans of a search have the same."""
    schedule = build_schedule(
        name, num_stages=stages, num_ranks=ranks, num_microbatches=microbatches
    )
    return _counts(schedule)


def _counts(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    traffic = ScheduleMessages.from_schedule(schedule)
    window = send_window(traffic) + SENDS_SPARE
    return tuple(tuple(_of_rank(traffic, window, rank)) for rank in range(schedule.num_ranks))


def _of_rank(traffic: ScheduleMessages, window: int, pp_rank: int) -> Iterator[int]:
    steps, receives = traffic.steps[pp_rank], traffic.receives[pp_rank]
    posted = arriving = local = 0
    leaving: Counter[Channel] = Counter()
    for position, step in enumerate(steps):
        while posted < len(steps) and posted <= position + RECEIVES_AHEAD:
            arriving += len(receives[posted])
            posted += 1
        if step.receive is not None:
            arriving -= 1
        elif step.local_input and step.action.kind is not ActionKind.W:
            local -= 1
        yield arriving + local + sum(leaving.values())
        if step.send is not None:
            channel = step.send.channel
            leaving[channel] = min(leaving[channel] + 1, window)
        elif step.local_output:
            local += 1
