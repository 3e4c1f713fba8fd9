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

from echelon.schedule.clock import BW, B, Clock, Rows, Timing, W
from echelon.schedule.list_scheduling import ListScheduler


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Hold a schedule with its times; `ends_s` is the sum of when the ranks are done."""

    rows: Rows
    timing: Timing
    ends_s: float

    @classmethod
    def of(cls, clock: Clock, rows: Rows) -> Found | None:
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


def best_of(found: Iterable[Found | None]) -> Found:
    """Return the best; the first of equals."""
    return min((one for one in found if one is not None), key=lambda one: one.cost)


def split_of(clock: Clock, rows: Rows) -> list[list[bool]]:
    """Return which cells of a schedule have B and W."""
    m = clock.num_microbatches
    split = [[False] * m for _ in range(clock.num_stages)]
    for row in rows:
        for code in row:
            lane, microbatch = divmod(code, m)
            kind, stage = divmod(lane, clock.num_stages)
            if kind == W:
                split[stage][microbatch] = True
    return split


def justify(scheduler: ListScheduler, found: Found, patience: float) -> Found:
    """Return the better of the schedule shifted to its end, and that shifted to its start."""
    clock = scheduler.clock
    split = split_of(clock, found.rows)
    late = clock.latest_starts(found.timing)
    ends = [start + own for start, own in zip(late, clock.duration_of, strict=True)]
    shifted = Found.of(clock, scheduler.backwards(ends, split, patience=patience))
    if shifted is None:
        return found
    return best_of((shifted, rebuilt(scheduler, shifted, patience)))


def rebuilt(scheduler: ListScheduler, found: Found, patience: float) -> Found | None:
    """Return the schedule built from its start, by how late each action may start."""
    clock = scheduler.clock
    late = clock.latest_starts(found.timing)
    rows = scheduler.forwards(late, split_of(clock, found.rows), patience=patience)
    return Found.of(clock, rows)


def settle(scheduler: ListScheduler, found: Found, patience: float, *, rounds: int) -> Found:
    """Justify until it no longer helps, at most `rounds` times."""
    best = found
    for _ in range(rounds):
        found = justify(scheduler, found, patience)
        if found.cost >= best.cost:
            break
        best = found
    return best


def shaken(scheduler: ListScheduler, found: Found, *, rounds: int, seed: int) -> Found:
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
        rows = scheduler.forwards(
            late, split_of(clock, found.rows), patience=rng.choice((0.5, 1.0))
        )
        other = Found.of(clock, rows)
        if other is None:
            continue
        other = best_of((other, justify(scheduler, other, rng.choice((0.5, 1.0)))))
        if other.timing.makespan_s <= found.timing.makespan_s:
            found = other
        best = best_of((best, found))
    return best


def fused(clock: Clock, found: Found) -> Found:
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
            other = Found.of(clock, _fuse(clock, best.rows, chosen))
            if other is not None and other.cost <= best.cost:
                best = other
            else:
                left += chosen
        pairs = left
    return best


_PARTS = (1, 4, 16, 64)


def _pairs(clock: Clock, found: Found) -> list[int]:
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


def _fuse(clock: Clock, rows: Rows, chosen: Sequence[int]) -> Rows:
    width = clock.num_stages * clock.num_microbatches
    heads = set(chosen)
    tails = {code + (W - B) * width for code in chosen}
    return [
        [code + (BW - B) * width if code in heads else code for code in row if code not in tails]
        for row in rows
    ]


def unfused(clock: Clock, rows: Rows) -> Rows:
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
