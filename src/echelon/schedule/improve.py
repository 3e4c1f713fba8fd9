# SPDX-License-Identifier: Apache-2.0
"""Make a schedule shorter: shift it to its end and back, fuse what need not be split, shake it.

*Justify* (forward-backward improvement: Li and Willis 1992; Valls, Ballestin and Quintanilla 2005,
for project scheduling): build the step again from its end, where the action that could end latest
goes first, and then from its start, where the action that must start first goes first. What lay
idle between actions moves to one end of the step, and the other end comes nearer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from echelon.schedule.list_scheduling import ListScheduler
from echelon.schedule.timer import BW, ActionRows, B, ScheduleTimer, ScheduleTimes, W


@dataclass(frozen=True, slots=True, eq=False)
class TimedSchedule:
    """Hold a schedule with its times; `ends_s` is the sum of when the ranks are done."""

    rows: ActionRows
    timing: ScheduleTimes
    ends_s: float

    @classmethod
    def from_rows(cls, clock: ScheduleTimer, rows: ActionRows) -> TimedSchedule | None:
        """Time `rows`; None where they cannot run."""
        timing = clock.run(rows)
        if timing is None:
            return None
        last = (row[-1] for row in rows)
        ends = sum(timing.start_s[code] + clock.duration_of[code] for code in last)
        return cls(rows, timing, ends)

    @property
    def cost(self) -> tuple[float, float]:
        """Return what makes one schedule better than another: its end, then those of its ranks."""
        return self.timing.makespan_s, self.ends_s


def shortest_schedule(found: Iterable[TimedSchedule | None]) -> TimedSchedule:
    """Return the best; the first of equals."""
    return min((one for one in found if one is not None), key=lambda one: one.cost)


def split_cells(clock: ScheduleTimer, rows: ActionRows) -> list[list[bool]]:
    """Return which cells of a schedule have B and W."""
    m = clock.num_microbatches
    split = [[False] * m for _ in range(clock.num_stages)]
    for row in rows:
        for code in row:
            kind_and_stage, microbatch = divmod(code, m)
            kind, stage = divmod(kind_and_stage, clock.num_stages)
            if kind == W:
                split[stage][microbatch] = True
    return split


def justify(scheduler: ListScheduler, found: TimedSchedule, patience: float) -> TimedSchedule:
    """Return the better of the schedule shifted to its end, and that shifted to its start."""
    clock = scheduler.clock
    split = split_cells(clock, found.rows)
    late = clock.latest_starts(found.timing)
    ends = [start + own for start, own in zip(late, clock.duration_of, strict=True)]
    shifted = TimedSchedule.from_rows(
        clock, scheduler.build(ends, split, patience=patience, backwards=True)
    )
    if shifted is None:
        return found
    late = clock.latest_starts(shifted.timing)
    rows = scheduler.build(late, split, patience=patience)
    return shortest_schedule((shifted, TimedSchedule.from_rows(clock, rows)))


def justify_repeatedly(
    scheduler: ListScheduler, found: TimedSchedule, patience: float, *, rounds: int
) -> TimedSchedule:
    """Justify until it no longer helps, at most `rounds` times."""
    best = found
    for _ in range(rounds):
        found = justify(scheduler, found, patience)
        if found.cost >= best.cost:
            break
        best = found
    return best


def perturb_schedule(
    scheduler: ListScheduler, found: TimedSchedule, *, rounds: int, seed: int
) -> TimedSchedule:
    """Disturb the order of a schedule at random, justify, and keep what is not worse."""
    clock = scheduler.clock
    rng = random.Random(seed)
    cycle = found.timing.makespan_s / clock.num_microbatches
    best = found
    for _ in range(rounds):
        reach, share = cycle * rng.choice((0.3, 1, 3)), rng.choice((0.1, 1))
        late = [
            start + rng.uniform(-reach, reach) if rng.random() < share else start
            for start in clock.latest_starts(found.timing)
        ]
        rows = scheduler.build(
            late, split_cells(clock, found.rows), patience=rng.choice((0.5, 1.0))
        )
        other = TimedSchedule.from_rows(clock, rows)
        if other is None:
            continue
        other = shortest_schedule((other, justify(scheduler, other, rng.choice((0.5, 1.0)))))
        if other.timing.makespan_s <= found.timing.makespan_s:
            found = other
        best = shortest_schedule((best, found))
    return best


def fuse_backward(clock: ScheduleTimer, found: TimedSchedule) -> TimedSchedule:
    """Return the schedule with B and the W directly behind it made one wherever this costs nothing.

    A BW sends its gradient later than its B did: it is worth that where it takes less time than
    both, and harmless where nobody waits. The pairs are tried in parts, ever smaller ones, those
    first that could start latest without a longer step.
    """
    pairs = _pairs(clock, found)
    best = found
    for parts in _PARTS:
        size = max(1, -(-len(pairs) // parts))
        left: list[int] = []
        for start in range(0, len(pairs), size):
            chosen = pairs[start : start + size]
            other = TimedSchedule.from_rows(clock, _fuse(clock, best.rows, chosen))
            if other is not None and other.cost <= best.cost:
                best = other
            else:
                left += chosen
        pairs = left
    return best


_PARTS = (1, 4, 16, 64)  # of a list


def _pairs(clock: ScheduleTimer, found: TimedSchedule) -> list[int]:
    """Return each B that its W follows directly, those with the most slack first."""
    width = clock.num_stages * clock.num_microbatches
    late, start = clock.latest_starts(found.timing), found.timing.start_s
    pairs = [
        code
        for row in found.rows
        for code, after in pairwise(row)
        if code // width == B and after == code + (W - B) * width
    ]
    return sorted(pairs, key=lambda code: start[code] - late[code])


def _fuse(clock: ScheduleTimer, rows: ActionRows, chosen: Sequence[int]) -> ActionRows:
    width = clock.num_stages * clock.num_microbatches
    heads = set(chosen)
    tails = {code + (W - B) * width for code in chosen}
    return [
        [code + (BW - B) * width if code in heads else code for code in row if code not in tails]
        for row in rows
    ]


def split_backward(clock: ScheduleTimer, rows: ActionRows) -> ActionRows:
    """Return the schedule with each BW made a B and a W."""
    width = clock.num_stages * clock.num_microbatches
    return [
        [
            one
            for code in row
            for one in (
                (code - (BW - B) * width, code - (BW - W) * width)
                if code // width == BW
                else (code,)
            )
        ]
        for row in rows
    ]
