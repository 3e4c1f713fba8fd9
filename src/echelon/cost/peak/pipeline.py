# SPDX-License-Identifier: Apache-2.0
"""Steps of few rounds that are as full as whole ones, and messages that a rank holds meanwhile.

Rounds of a pipeline are alike: the walk of a step of few rounds gives the peak of the whole step.

Messages of a pipeline rank are in its memory, action by action (`parallel/pipeline.py`): a receive
is posted a few actions before the one that takes it, with memory of its own; a send is kept until
the window of its channel has gone on. A message to a stage on the same rank is kept until that
stage takes it. Inputs and outputs of an action count with the action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import lcm

from echelon.core.plan import Plan
from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.deadlock import send_window
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import (
    RECEIVES_AHEAD,
    SENDS_SPARE,
    Channel,
    ScheduleMessages,
)

ROUNDS = 2
"""Rounds of a pipeline that tell of all."""

LEAST_MICROBATCHES = 3
"""Microbatches of a step of few rounds, where the whole step has as many."""

LEAST_ALONE = 4
"""Microbatches that are walked where there is no pipeline: a sum may still be pending two later."""

LEAST_WALKED = 8
"""Microbatches that are walked of a pipeline at least: of two ranks two rounds are too few for the
messages that are there together."""


def with_few_microbatches(plan: Plan) -> Plan:
    """Return a plan whose steps have two rounds of its pipeline, where they have more.

    Rounds are alike: each microbatch meets the same actions in the same order. A step has at least
    twice as many as there are pipeline ranks then, so that all of them are as full as they get, and
    at least three: the first, one like all between, and the last.
    """
    if plan.layout.pipeline.rows:
        return plan
    period = _period(plan)
    few = plan.num_microbatches % period + max(ROUNDS * period, LEAST_MICROBATCHES)
    return _with_microbatches(plan, few)


def with_as_full_ranks(plan: Plan) -> Plan:
    """Return a plan of few rounds whose ranks hold as many microbatches at a time; or the plan.

    Schedules that run all microbatches forward first hold more of them in a longer step.
    """
    if plan.layout.pipeline.rows:
        return plan
    period = _period(plan)
    least = LEAST_ALONE if plan.mesh.pp == 1 else LEAST_WALKED
    rounds = max(ROUNDS, -(-least // period))
    few = _with_microbatches(plan, plan.num_microbatches % period + rounds * period)
    if few is plan:
        return plan
    more = _with_microbatches(plan, few.num_microbatches + period)
    alike = [most_in_flight(schedule_from_plan(one)) for one in (few, more)]
    return few if alike[0] == alike[1] else plan


def most_in_flight(schedule: Schedule) -> list[int]:
    """Return how many passes through a stage each rank has begun and not ended, at most."""
    found: list[int] = []
    for row in schedule.actions:
        now = most = 0
        for action in row:
            now += action.kind is ActionKind.F
            most = max(most, now)
            now -= action.kind in (ActionKind.W, ActionKind.BW)
        found.append(most)
    return found


def _period(plan: Plan) -> int:
    return lcm(plan.mesh.pp, SCHEDULES[plan.layout.pipeline.schedule].microbatch_multiple)


def _with_microbatches(plan: Plan, count: int) -> Plan:
    whole = plan.num_microbatches
    if count >= whole:
        return plan
    sequences = plan.mathematics.global_sequences // whole * count
    return replace(plan, mathematics=replace(plan.mathematics, global_sequences=sequences))


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
