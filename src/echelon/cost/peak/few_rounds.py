# SPDX-License-Identifier: Apache-2.0
"""A step of a few rounds of its pipeline, whose ranks are as full as those of the whole step."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from echelon.core.plan import Plan
from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.build import SCHEDULES
from echelon.schedule.from_plan import schedule_from_plan

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
