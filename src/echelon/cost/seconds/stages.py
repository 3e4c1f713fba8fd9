# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline: cut so that the slowest rank is fast, and timed event by event.

A step lasts at least as long as the slowest rank computes, and the others wait for it (Narayanan et
al., PipeDream, 2019, section 3.1, cut layers by dynamic programming for the same reason). The
embedding stays on the first stage and the head on the last; blocks between are cut in order, and a
stage may have none.

- One stage on each rank: exact. Dynamic programming finds the least possible time of the slowest
  stage; among the cuts that reach it, the one most even in blocks (least sum of squares of their
  numbers), and among those the one that gives blocks to later stages, whose ranks hold the
  activations of fewer microbatches.
- Several stages on a rank: what counts is their sum. Where all blocks take equally long that is
  exact too: blocks go one by one to the rank that would be fastest with one more, and within the
  rank to the stage that would. Otherwise the slowest stage is made as fast as it can be, and then
  one block at a time moves over a cut for as long as the slowest rank gains: good, but not proved
  to be the best.

Closed forms take all ranks for as slow as the one with most blocks. Event by event
(`simulated_terms`), stages have the blocks of the best cut, and the actions of the schedule are
timed one by one with the seconds of units (`unit_times.py`); messages keep their closed form. The
search and the page of a run time a plan by this one function, and cut its stages by the other.

A step of many microbatches is the same pattern over and over. Where there are more than MOST_TIMES
as many as pipeline ranks, steps of fewer are timed, each a period longer than the one before, until
a period adds as much as the last one added and no less than its slowest rank computes. No period
after it can add another amount then, and the rest is a multiplication
(`tests/cost/seconds/test_stages.py` compares with whole steps).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from echelon.core.plan import Plan
from echelon.cost.seconds.unit_times import UnitTimes, durations_from_stages, stage_seconds
from echelon.schedule.action import Schedule
from echelon.schedule.from_plan import placement, schedule_from_plan
from echelon.schedule.timer import FlatSchedule, build_flat_schedule, flatten_schedule

Stages = tuple[tuple[int, ...], ...]

_ALIKE = 1e-9
"""Two times are equal where they differ by less than this share: sums are rounded."""

_FEW_STAGES = 32
"""Up to so many stages, a block is tried on every other stage."""


def imbalance(
    stages: Sequence[Sequence[int]], held: Sequence[Sequence[int]], times: UnitTimes
) -> float:
    """Return how many times as long as the mean the slowest rank takes; 1 is balanced.

    Rank `r` holds the stages `held[r]`. Where two ranks hold a stage (mirrored microbatches), each
    computes it for half of them.
    """
    ranks = rank_seconds(stages, held, times)
    mean_s = sum(ranks) / len(ranks)
    return max(ranks) / mean_s if mean_s else 1.0


def rank_seconds(
    stages: Sequence[Sequence[int]], held: Sequence[Sequence[int]], times: UnitTimes
) -> tuple[float, ...]:
    """Return the seconds of each rank for one microbatch through all stages."""
    seconds = stage_seconds(stages, times)
    owners = [sum(stage in mine for mine in held) for stage in range(len(stages))]
    return tuple(sum(seconds[stage] / owners[stage] for stage in mine) for mine in held)


def split_layers(layers: int, stages: int) -> Stages:
    """Return consecutive blocks for each stage, as even in number as they can be.

    Blocks that are left over go to stages between the ends first, the latest first: the last stage
    has the head and the loss to compute, the first the embedding, and under 1F1B an early stage
    holds the activations of more microbatches. The ends take one only when all others have.
    """
    base, rest = divmod(layers, stages)
    takers = [*range(stages - 2, 0, -1), 0, stages - 1][:rest]
    return _stages([base + (stage in takers) for stage in range(stages)])


def balance(times: UnitTimes, num_layers: int, held: Sequence[Sequence[int]]) -> Stages:
    """Return the blocks of each stage; rank `r` holds the stages `held[r]`.

    The stages are those that `held` names, from 0 up, each on one rank or, with copies, on two.
    """
    blocks, empty = _seconds(times, num_layers, held)
    if all(len(mine) == 1 for mine in held):
        return _stages(_cut(blocks, empty))
    if max(blocks) - min(blocks) <= _ALIKE * max(blocks):
        return _stages(_assign_equal_blocks(blocks[0], num_layers, empty, held))
    return _stages(_improved(_cut(blocks, empty), blocks, empty, held))


def balanced_cuts(
    times: UnitTimes, num_layers: int, held: Sequence[Sequence[int]]
) -> tuple[Stages, ...]:
    """Return the cuts worth a simulation: that of `balance`, and that of the fastest slowest stage.

    They are one where each rank holds one stage. Where it holds several, a schedule that visits
    them in turn may gain more from stages that are alike than from ranks that are.
    """
    first = balance(times, num_layers, held)
    if all(len(mine) == 1 for mine in held):
        return (first,)
    second = _stages(_cut(*_seconds(times, num_layers, held)))
    return (first,) if first == second else (first, second)


def _seconds(
    times: UnitTimes, num_layers: int, held: Sequence[Sequence[int]]
) -> tuple[list[float], tuple[float, ...]]:
    """Return the seconds of each block, and of each stage without any."""
    num_stages = 1 + max(stage for mine in held for stage in mine)
    blocks = [times.total_s(f"layers.{layer}") for layer in range(num_layers)]
    return blocks, stage_seconds([()] * num_stages, times)


def _stages(counts: Sequence[int]) -> Stages:
    return tuple(tuple(range(a, b)) for a, b in pairwise(accumulate(counts, initial=0)))


def _cut(blocks: Sequence[float], empty: Sequence[float]) -> list[int]:
    """Return how many blocks each stage takes; `empty` are the seconds of stages without any."""
    before = list(accumulate(blocks, initial=0.0))
    best = _least_slowest(before, empty)
    limit = best * (1 + _ALIKE)
    layers, stages = len(blocks), len(empty)
    # squares[n]: the least sum of squares with which the stages from here on take the last blocks,
    # from block n to the end, none of them above the limit.
    squares = [inf] * layers + [0.0]
    choices: list[list[int]] = []
    for stage in reversed(range(stages)):
        found, chosen = [inf] * (layers + 1), [0] * (layers + 1)
        for start in range(layers + 1):
            for end in range(start, layers + 1):
                if before[end] - before[start] + empty[stage] > limit:
                    break
                cost = squares[end] + (end - start) ** 2
                # The first of equal ones: fewer blocks here, more on later stages.
                if cost < found[start]:
                    found[start], chosen[start] = cost, end - start
        squares = found
        choices.append(chosen)
    counts: list[int] = []
    start = 0
    for chosen in reversed(choices):
        counts.append(chosen[start])
        start += chosen[start]
    return counts


def _least_slowest(before: Sequence[float], empty: Sequence[float]) -> float:
    """Return the seconds of the slowest stage where it is as fast as it can be."""
    upto = np.array(before)
    # between[start, end]: what the blocks from start to end take, nothing for an end before.
    between = np.where(np.tri(len(upto)).T > 0, upto[None, :] - upto[:, None], np.inf)
    # slowest[n]: of the stages so far, where they take the first n blocks.
    slowest = upto + empty[0]
    for extra in empty[1:]:
        slowest = np.maximum(slowest[:, None], between + extra).min(axis=0)
    return float(slowest[-1])


def _assign_equal_blocks(
    block: float, num_layers: int, empty: Sequence[float], held: Sequence[Sequence[int]]
) -> list[int]:
    """Return how many equal blocks each stage takes, dealt one by one.

    Ranks that hold copies of the same stages are one place: a block on either is on both, and each
    computes it for its share of the microbatches.
    """
    sharing = Counter(tuple(mine) for mine in held)
    places = list(sharing)
    counts = [0] * len(empty)
    total = [sum(empty[stage] for stage in place) / sharing[place] for place in places]
    for _ in range(num_layers):
        index = min(
            range(len(places)),
            key=lambda i: (_rounded(total[i] + block / sharing[places[i]], block), -i),
        )
        total[index] += block / sharing[places[index]]
        mine = places[index]
        stage = min(mine, key=lambda s: (_rounded(empty[s] + counts[s] * block, block), -s))
        counts[stage] += 1
    return counts


def _rounded(seconds: float, block: float) -> float:
    """Return seconds such that sums that differ by rounding alone compare equal."""
    return round(seconds / block, 6)


def _improved(
    counts: list[int],
    blocks: Sequence[float],
    empty: Sequence[float],
    held: Sequence[Sequence[int]],
) -> list[int]:
    """Return counts between which no single block can move to make the slowest rank faster."""
    before, pairs = list(accumulate(blocks, initial=0.0)), _moves(len(counts))
    owners = [sum(stage in mine for mine in held) for stage in range(len(counts))]

    def judged(counts: Sequence[int]) -> tuple[float, float]:
        """Return what a cut is judged by: its slowest rank, then its slowest stage."""
        seconds: list[float] = []
        start = 0
        for extra, count in zip(empty, counts, strict=True):
            seconds.append(before[start + count] - before[start] + extra)
            start += count
        ranks = (sum(seconds[stage] / owners[stage] for stage in mine) for mine in held)
        return max(ranks), max(seconds)

    best = judged(counts)
    while True:
        moved = (
            [n - (s == giver) + (s == taker) for s, n in enumerate(counts)]
            for giver, taker in pairs
            if counts[giver]
        )
        least = min(((judged(one), one) for one in moved), default=(best, counts))
        if not _better(least[0], best):
            return counts
        best, counts = least


def _moves(num_stages: int) -> list[tuple[int, int]]:
    """Return between which stages a block may move; where there are many, between neighbours."""
    far = num_stages if num_stages <= _FEW_STAGES else 1
    return [
        (giver, taker)
        for giver in range(num_stages)
        for taker in range(max(0, giver - far), min(num_stages, giver + far + 1))
        if giver != taker
    ]


def _better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether a cut is better than another one by more than rounding."""
    alike = one[0] <= other[0] * (1 + _ALIKE)
    return one[0] < other[0] * (1 - _ALIKE) or (alike and one[1] < other[1] * (1 - _ALIKE))


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
