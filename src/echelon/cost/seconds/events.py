# SPDX-License-Identifier: Apache-2.0
"""A step of a pipeline timed event by event: its schedule, with stages as they are really cut.

Closed forms take all ranks for as slow as the one with most blocks. Here blocks are cut so that the
slowest rank is as fast as it can be, and the actions of the schedule are timed one by one with the
seconds of units (`unit_times.py`); messages keep their closed form. The search and the page of a
run time a plan by this one function, and cut its stages by the other.

A step of many microbatches is the same pattern over and over. Where there are more than MOST_TIMES
as many as pipeline ranks, steps of fewer are timed, each a period longer than the one before, until
a period adds what the last one added and no less than its slowest rank computes. No period after it
can add another amount then, and the rest is a multiplication (`tests/cost/seconds/test_events.py`
compares with whole steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.cost.seconds.balance import Stages, balanced_cuts
from echelon.cost.seconds.unit_times import UnitTimes, durations_from_stages
from echelon.schedule.action import Schedule
from echelon.schedule.flat_schedule import FlatSchedule, build_flat_schedule, flatten_schedule
from echelon.schedule.from_plan import placement, schedule_from_plan

MOST_TIMES = 8  # microbatches of each pipeline rank
FEW_TIMES = (2, 3, 4)
"""Periods of microbatches that the first shorter steps have."""
SAME = 1e-9  # relative difference
MOST_COMPARED = 20_000
"""Stages x microbatches above which a cut is chosen without timing it."""
SENT = ("tensor", "context", "expert")
"""Terms of a step that an event of a schedule has in it, but measured times do not."""
COMPUTED = ("matmul", "attention", "memory", "host", "head", "recompute", *SENT)
"""Terms of a step that an event of a schedule has in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """Give what decides the order of a step's actions: numbers, and a schedule by its name.

    `listed` is the schedule itself where no builder makes it: from a file, or found by a search.
    """

    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    listed: Schedule | None = None

    @classmethod
    def from_plan(cls, plan: Plan) -> PipelineOrder:
        """Return the order of a plan."""
        pipeline = plan.layout.pipeline
        return cls(
            schedule=pipeline.schedule,
            num_ranks=plan.mesh.pp,
            num_stages=plan.num_stages,
            num_microbatches=plan.num_microbatches,
            listed=schedule_from_plan(plan) if pipeline.rows else None,
        )

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of each rank."""
        found = self.listed or placement(
            self.schedule,
            num_stages=self.num_stages,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
        )
        return tuple(found.stages_of(rank) for rank in range(self.num_ranks))

    @property
    def num_actions(self) -> int:
        """Return how many actions are timed, where few microbatches are enough."""
        each = 3 * self.num_stages
        return each * sum(self.lengths or (self.num_microbatches,))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return how many microbatches shorter steps have; none where the whole step is short.

        A period is a round of an interleaved pipeline, and even, for those that are entered at both
        ends; what is left of a step after whole periods is in all of them.
        """
        pp, whole = self.num_ranks, self.num_microbatches
        if whole <= MOST_TIMES * pp or self.listed is not None:
            return ()
        period = pp if pp % 2 == 0 else 2 * pp
        few = tuple(whole % period + times * period for times in FEW_TIMES)
        return few if 2 * few[-1] < whole else ()

    def lanes(self, count: int) -> FlatSchedule:
        """Return the actions of a step of so many microbatches."""
        if self.listed is not None:
            return flatten_schedule(self.listed)
        return build_flat_schedule(self.schedule, self.num_stages, self.num_ranks, count)


def balanced_stages(order: PipelineOrder, times: UnitTimes, layers: int) -> Stages:
    """Return the blocks of each stage; where two cuts are in question, those of the faster step."""
    first, *others = balanced_cuts(times, layers, order.held)
    if not others or order.num_stages * order.num_microbatches > MOST_COMPARED:
        return first
    return min((first, *others), key=lambda stages: simulated_step_s(order, times, stages))


def simulated_step_s(order: PipelineOrder, times: UnitTimes, stages: Stages) -> float:
    """Return how long the actions of a step take, all ranks together; messages are free."""
    durations, whole = durations_from_stages(stages, times), order.num_microbatches
    lengths = list(order.lengths)
    spans = [order.lanes(length).makespan_s(durations) for length in lengths]
    while lengths:
        period = lengths[-1] - lengths[-2]
        before, last = ((spans[i] - spans[i - 1]) / (lengths[i] - lengths[i - 1]) for i in (-2, -1))
        least = max(order.lanes(lengths[-1]).busy_s(durations)) / lengths[-1]
        if abs(last - before) <= SAME * last and last >= (1.0 - SAME) * least:
            return spans[-1] + last * (whole - lengths[-1])
        longer = lengths[-1] + 2 * period
        if longer >= whole:
            break
        lengths.append(longer)
        spans.append(order.lanes(longer).makespan_s(durations))
    return order.lanes(whole).makespan_s(durations)


def mean_busy_s(order: PipelineOrder, times: UnitTimes) -> float:
    """Return how long a rank computes in a step, in the mean of all ranks."""
    return order.num_microbatches * sum(map(times.total_s, times.forward_s)) / order.num_ranks


def simulated_terms(
    terms: Mapping[str, float],
    order: PipelineOrder,
    times: UnitTimes,
    stages: Stages,
    *,
    share: float = 1.0,
) -> dict[str, float]:
    """Return the terms of a step whose actions are timed: those of the mean rank, and its bubble.

    Closed forms charge what the slowest rank has; here that is part of the bubble. Where ranks have
    only a `share` of a core while all are at work, those that wait leave theirs to others: a step
    is as long as its longest chain at the speed of a whole core, or as all of the work takes on the
    cores, whichever is longer (Graham, 1966).
    """
    busy = mean_busy_s(order, times)
    seconds = simulated_step_s(order, times, stages)
    seconds = seconds if share == 1.0 else max(share * seconds, busy)
    timed = [name for name in COMPUTED if times.source == "modelled" or name not in SENT]
    part = min(seconds, busy) / sum(terms[name] for name in timed)
    mean = {name: part * terms[name] for name in timed}
    return {**terms, **mean, "bubble": max(0.0, seconds - busy)}
