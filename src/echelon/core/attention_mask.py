# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may meet, and where positions live: both as arithmetic on positions.

A rank holds positions in *runs* (start, start + step, ...): a contiguous chunk has step 1, the
positions of one rank under striped placement have the degree as step. Between two runs of the same
step, the rule of a mask is a band of the difference of their indices; so what is visible, how much
of it there is, and which keys are needed at all are closed forms.

Context parallelism cuts the positions of a sequence over `cp = ulysses_degree x ring_degree` ranks.
The ranks of one Ulysses group are neighbours (fast links), so context rank c is place
``c % ulysses_degree`` in its Ulysses group, and ``c // ulysses_degree`` on its ring. Each place of
a ring holds a part of the positions, each member of a Ulysses group an equal piece of its part:

    contiguous   place i holds the i-th of `ring_degree` chunks
    zigzag       place i holds chunks i and 2n - 1 - i of 2n (Brandon et al., "Striped Attention",
                 2023, compares; Grattafiori et al., "Llama 3", 2024, section 3.3.2): the work of a
                 causal mask is the same everywhere
    striped      place i holds positions i, i + n, i + 2n, ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

DocumentStarts = tuple[tuple[int, ...], ...]
"""For each sequence the positions where its documents start: ascending, the first is 0."""


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Name the positions start, start + step, ..., `count` of them, in order."""

    start: int
    step: int
    count: int

    def position(self, index: int) -> int:
        """Return the position at `index`."""
        return self.start + self.step * index

    def cut(self, first: int, last: int) -> PositionRun:
        """Return the run of the indices from `first` up to but without `last`."""
        return PositionRun(self.position(first), self.step, max(0, last - first))

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of indices whose positions are at least `start` and below `stop`."""
        first = min(max(0, _ceil_div(start - self.start, self.step)), self.count)
        last = min(max(0, _ceil_div(stop - self.start, self.step)), self.count)
        return first, max(first, last)


def cut_position_runs(
    runs: Iterable[PositionRun], first: int, last: int
) -> tuple[PositionRun, ...]:
    """Return the positions at the rows from `first` up to but without `last` of some runs."""
    found: list[PositionRun] = []
    before = 0
    for run in runs:
        start, stop = max(first, before) - before, min(last, before + run.count) - before
        if start < stop:
            found.append(run.cut(start, stop))
        before += run.count
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Band:
    """Say that query i meets key j where ``low <= i - j <= high``; None: no bound."""

    low: int | None
    high: int | None

    def allows(self, i: int, j: int) -> bool:
        """Return whether query i meets key j."""
        above = self.low is None or i - j >= self.low
        return above and (self.high is None or i - j <= self.high)

    def shifted(self, q_first: int, k_first: int) -> Band:
        """Return this band in indices that are counted from `q_first` and `k_first`."""
        by = k_first - q_first
        return Band(
            None if self.low is None else self.low + by,
            None if self.high is None else self.high + by,
        )

    def keys(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """Return the range of keys that any of the queries 0 to num_queries - 1 meets."""
        first = 0 if self.high is None else max(0, -self.high)
        last = num_keys if self.low is None else min(num_keys, num_queries - self.low)
        empty = self.low is not None and self.high is not None and self.low > self.high
        none = empty or num_queries == 0 or first >= last
        return (0, 0) if none else (first, last)

    def covers(self, num_queries: int, num_keys: int) -> bool:
        """Return whether every query meets every key."""
        if not num_queries or not num_keys:
            return True
        low = self.low is None or 1 - num_keys >= self.low
        return low and (self.high is None or num_queries - 1 <= self.high)

    def num_pairs(self, num_queries: int, num_keys: int) -> int:
        """Return how many (query, key) pairs are visible."""
        low = 1 - num_keys if self.low is None else max(self.low, 1 - num_keys)
        high = num_queries - 1 if self.high is None else min(self.high, num_queries - 1)
        if low > high or not num_queries or not num_keys:
            return 0
        return _below(high, num_queries, num_keys) - _below(low - 1, num_queries, num_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    """Give the rule of a model: a query at p meets a key at k where

    `causal`: k <= p; and with a `window` of w: p - w < k (and k < p + w where not causal).
    """

    causal: bool = True
    window: int | None = None

    def allows(self, query: int, key: int) -> bool:
        """Return whether the query at one position meets the key at another."""
        if self.causal and key > query:
            return False
        return self.window is None or abs(query - key) < self.window

    def band(self, queries: PositionRun, keys: PositionRun) -> Band:
        """Return the band of indices that is visible between two runs of the same step."""
        step = queries.step if queries.count > 1 else keys.step
        assert queries.count <= 1 or keys.count <= 1 or queries.step == keys.step
        ahead = queries.start - keys.start
        # p - k = ahead + step (i - j)
        low = high = None
        if self.window is not None:
            high = (self.window - 1 - ahead) // step
            low = _ceil_div(1 - self.window - ahead, step)
        if self.causal:
            low = _ceil_div(-ahead, step)
        return Band(low, high)

    def num_pairs(self, length: int) -> int:
        """Return the visible (query, key) pairs of a whole sequence."""
        whole = PositionRun(0, 1, length)
        return self.band(whole, whole).num_pairs(length, length)


def _below(high: int, num_queries: int, num_keys: int) -> int:
    """Return the pairs with ``i - j <= high``, for ``-num_keys <= high <= num_queries - 1``."""
    # Query i meets the keys j >= i - high.
    unbounded = min(num_queries, max(0, high + 1))  # queries that meet all keys
    total = unbounded * num_keys
    # the others meet num_keys - (i - high) keys, until none is left
    last = min(num_queries, high + num_keys)
    count = last - unbounded
    if count > 0:
        first_keys = num_keys - (unbounded - high)
        total += count * first_keys - count * (count - 1) // 2
    return total


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


PlacementKind = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Say which positions each context rank holds, in the order in which it holds them."""

    kind: PlacementKind
    ring_degree: int
    ulysses_degree: int
    length: int

    @property
    def degree(self) -> int:
        """Return the number of context ranks."""
        return self.ring_degree * self.ulysses_degree

    def ring_place(self, cp_rank: int) -> int:
        """Return the place of a context rank on its ring."""
        return cp_rank // self.ulysses_degree

    def ring_runs(self, place: int) -> tuple[PositionRun, ...]:
        """Return the positions of one place of a ring, in runs."""
        n = self.ring_degree
        if self.kind == "striped":
            return (PositionRun(place, n, self.length // n),)
        if self.kind == "contiguous" or n == 1:
            size = self.length // n
            return (PositionRun(place * size, 1, size),)
        half = self.length // (2 * n)
        return (
            PositionRun(place * half, 1, half),
            PositionRun((2 * n - 1 - place) * half, 1, half),
        )

    def runs(self, cp_rank: int) -> tuple[PositionRun, ...]:
        """Return the positions of one context rank, in runs."""
        place, member = divmod(cp_rank, self.ulysses_degree)
        size = self.length // self.degree
        return cut_position_runs(self.ring_runs(place), member * size, (member + 1) * size)

    def positions(self, cp_rank: int) -> list[int]:
        """Return the positions of one context rank, in order."""
        return [run.position(i) for run in self.runs(cp_rank) for i in range(run.count)]
