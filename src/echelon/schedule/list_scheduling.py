# SPDX-License-Identifier: Apache-2.0
"""List scheduling: whenever a rank is free, it starts the most urgent action that it can.

The same code runs a step forwards and backwards in time: backwards W comes first and takes the
memory that F gives back. Within a stage, microbatches pass in order, so what a rank can do next is
the head of a few *lanes*, one for each kind of action of each of its stages.

Two things are looked at beyond urgency:

- *Soon*: a rank that waits a little for a more urgent action, whose message is on its way, may do
  better than one that starts a long action now. `patience` is the longest wait as a share of that
  action.
- *Safety*: where a rank holds several stages and little memory, forward passes of its first stage
  could take all memory, and then those of its later stages never start. An action that takes memory
  starts only if the microbatches could then still be finished one after another (the banker's
  algorithm, Dijkstra 1965, with the microbatches in order).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from echelon.schedule.timer import BW, ActionRows, B, F, ScheduleTimer, W

SplitMask = Sequence[Sequence[bool]]
"""For each stage and microbatch, whether the backward pass is split into B and W."""


@dataclass(slots=True, eq=False)
class _ActionQueue:
    """The actions of one kind on one stage in the order in which they run."""

    codes: list[int]
    """Code of each action."""
    seconds: list[float]
    """Seconds of each action."""
    after: _ActionQueue | None = None
    """The queue on this rank that actions wait for."""
    needs: list[int] = field(default_factory=list[int])
    """Actions of `after` that must have ended before each action starts."""
    takes: list[bool] = field(default_factory=list[bool])
    """Whether each action takes the memory of a microbatch."""
    frees: list[bool] = field(default_factory=list[bool])
    """Whether each action frees it."""
    stage: int = 0
    """The stage."""
    urgency: list[float] = field(default_factory=list[float])
    """How urgent each action is."""
    arrivals: list[float] = field(default_factory=list[float])
    """When the message for each action is here, known as soon as its maker starts."""
    feeds: _ActionQueue | None = None
    """The queue whose messages its actions make."""
    channel: int = -1
    """The channel of those; -1 for none."""
    transfer_s: float = 0.0
    """Seconds of one of those messages."""
    done: int = 0
    """Actions that have started."""


@dataclass(slots=True, eq=False)
class _Rank:
    """What a rank has run, and the memory that it holds for each of its stages."""

    queues: list[_ActionQueue]
    limit: int
    taken: dict[int, int]
    freed: dict[int, int]
    row: list[int] = field(default_factory=list[int])
    free_at: float = 0.0

    def may_take(self, stage: int) -> bool:
        """Return whether the microbatches can still be finished in order after taking once more.

        Microbatch j finishes last of those up to j if what it holds and still takes here, with
        what later ones hold, is within the limit.
        """
        taken, freed = self.taken, self.freed
        if len(taken) == 1:
            return taken[stage] - freed[stage] < self.limit
        taken[stage] += 1
        safe = all(
            sum(taken[s] - max(j, freed[s]) if j < taken[s] else 1 for s in taken) <= self.limit
            for j in {*freed.values(), *taken.values()}
        )
        taken[stage] -= 1
        return safe


class ListScheduler:
    """Build schedules of one `ScheduleTimer`'s stages, forwards or backwards in time."""

    def __init__(self, clock: ScheduleTimer, limits: Sequence[int]) -> None:
        """Hold the most pairs of stage and microbatch that each rank may hold."""
        self.clock = clock
        self.limits = limits

    def build(
        self,
        urgency: Sequence[float],
        split: SplitMask,
        *,
        patience: float,
        backwards: bool = False,
    ) -> ActionRows:
        """Return a schedule built from its start, where the action of less urgency goes first.

        Built backwards, from its end, the action of more urgency stands last. `urgency` is by the
        number of an action.
        """
        wanted = [-one for one in urgency] if backwards else urgency
        ranks = self._ranks(wanted, split, reverse=backwards)
        _dispatch(ranks, self.clock, patience)
        assert all(queue.done == len(queue.codes) for rank in ranks for queue in rank.queues)
        return [rank.row[::-1] if backwards else rank.row for rank in ranks]

    def _ranks(self, urgency: Sequence[float], split: SplitMask, *, reverse: bool) -> list[_Rank]:
        clock = self.clock
        ranks = [_Rank([], limit, {}, {}) for limit in self.limits]
        by_kind = [
            [
                self._lane(kinds, stage, split[stage], urgency, reverse=reverse)
                for stage in range(clock.num_stages)
            ]
            for kinds in ((F,), (BW, B), (W,))
        ]
        for stage, rank in enumerate(clock.stage_ranks):
            forward, backward, weight = (kind[stage] for kind in by_kind)
            _hold(forward, backward, weight, split[stage], reverse=reverse)
            ranks[rank].queues += [queue for queue in (backward, forward, weight) if queue.codes]
            ranks[rank].taken[stage] = ranks[rank].freed[stage] = 0
        self._join(by_kind[0], 1, reverse=reverse)
        self._join(by_kind[1], -1, reverse=reverse)
        for kind, end in ((0, 0), (1, -1)):
            first = by_kind[kind][-1 - end if reverse else end]
            first.arrivals = [0.0] * len(first.codes)
        for queue in by_kind[2]:
            queue.arrivals = [0.0] * len(queue.codes)
        return ranks

    def _lane(
        self,
        kinds: tuple[int, ...],
        stage: int,
        split: Sequence[bool],
        urgency: Sequence[float],
        *,
        reverse: bool,
    ) -> _ActionQueue:
        """Return the lane of F, of W, or of B and BW, as each cell has it."""
        clock, m = self.clock, self.clock.num_microbatches
        cells = range(m - 1, -1, -1) if reverse else range(m)
        codes = [
            (kinds[split[k] if len(kinds) > 1 else 0] * clock.num_stages + stage) * m + k
            for k in cells
            if kinds != (W,) or split[k]
        ]
        return _ActionQueue(
            codes=codes,
            seconds=[clock.duration_of[code] for code in codes],
            stage=stage,
            urgency=[urgency[code] for code in codes],
        )

    def _join(self, queues: list[_ActionQueue], ahead: int, *, reverse: bool) -> None:
        """Tie each lane to the lane that its messages go to."""
        clock = self.clock
        for stage, queue in enumerate(queues):
            if 0 <= stage + ahead < len(queues):
                code = queue.codes[0]
                source, target = (stage + ahead, stage) if reverse else (stage, stage + ahead)
                queues[source].feeds = queues[target]
                queues[source].channel = clock.channel_of[code]
                queues[source].transfer_s = clock.transfer_of[code]


def _hold(
    forward: _ActionQueue,
    backward: _ActionQueue,
    weight: _ActionQueue,
    split: Sequence[bool],
    *,
    reverse: bool,
) -> None:
    """Say what waits for what on a stage's own rank, and what takes and frees memory.

    Cells take memory in order: backwards in time, a W waits for the BW of earlier cells.
    """
    m = len(split)
    yes, no = [True] * m, [False] * m
    cells = split[::-1] if reverse else split
    fused = [not one for one in cells]
    before = [k for k, one in enumerate(cells) if one]
    if reverse:
        so_far = [0]
        for one in cells:
            so_far.append(so_far[-1] + one)
        backward.after, backward.needs = weight, so_far[1:]
        backward.takes, backward.frees = fused, no
        forward.after, forward.needs = backward, list(range(1, m + 1))
        forward.takes, forward.frees = no, yes
        weight.takes, weight.frees = [True] * len(before), [False] * len(before)
        last_fused = accumulate((k + 1 if one else 0 for k, one in enumerate(fused)), max)
        weight.after = backward
        weight.needs = [need for need, one in zip(last_fused, cells, strict=True) if one]
    else:
        backward.after, backward.needs = forward, list(range(1, m + 1))
        backward.takes, backward.frees = no, fused
        forward.takes, forward.frees = yes, no
        weight.after, weight.needs = backward, [k + 1 for k in before]
        weight.takes, weight.frees = [False] * len(before), [True] * len(before)


def _dispatch(ranks: list[_Rank], clock: ScheduleTimer, patience: float) -> None:
    """Let every rank run all its lanes."""
    owner = {id(queue): place for place, rank in enumerate(ranks) for queue in rank.queues}
    link = [0.0] * clock.num_channels
    events = [(0.0, place) for place in range(len(ranks))]
    while events:
        now, place = heapq.heappop(events)
        rank = ranks[place]
        if now < rank.free_at:
            continue
        queue, later = _choose(rank, now, patience)
        if queue is None:
            if later < float("inf"):
                heapq.heappush(events, (later, place))
            continue
        k = queue.done
        end = rank.free_at = now + queue.seconds[k]
        rank.row.append(queue.codes[k])
        queue.done = k + 1
        if queue.takes[k]:
            rank.taken[queue.stage] += 1
        if queue.frees[k]:
            rank.freed[queue.stage] += 1
        heapq.heappush(events, (end, place))
        fed = queue.feeds
        if fed is not None:
            arrival = end
            if queue.channel >= 0:
                sent = max(end, link[queue.channel])
                arrival = link[queue.channel] = sent + queue.transfer_s
            fed.arrivals.append(arrival)
            target = owner[id(fed)]
            if ranks[target].free_at <= arrival:
                heapq.heappush(events, (arrival, target))


def _choose(rank: _Rank, now: float, patience: float) -> tuple[_ActionQueue | None, float]:
    """Return the lane whose head starts now, or None and when to look again."""
    best: _ActionQueue | None = None
    least = float("inf")
    coming: list[tuple[float, float, _ActionQueue]] = []
    for queue in rank.queues:
        k = queue.done
        if k >= len(queue.arrivals):
            continue
        after = queue.after
        if after is not None and after.done < queue.needs[k]:
            continue
        arrival, urgency = queue.arrivals[k], queue.urgency[k]
        if arrival > now:
            coming.append((arrival, urgency, queue))
        elif urgency < least and (not queue.takes[k] or rank.may_take(queue.stage)):
            best, least = queue, urgency
    if best is not None:
        if not patience or not coming:
            return best, now
        longest = now + patience * best.seconds[best.done]
    else:
        longest = float("inf")
    waits = [
        arrival
        for arrival, urgency, queue in coming
        if arrival < longest
        and urgency < least
        and (not queue.takes[queue.done] or rank.may_take(queue.stage))
    ]
    if best is not None and not waits:
        return best, now
    return None, min(waits, default=float("inf"))
