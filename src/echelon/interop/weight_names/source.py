"""Where a file keeps a parameter, and in which order its rows lie there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """Say that `count` rows of a parameter from `here` on are each `step`-th row from `there`."""

    here: int
    count: int
    there: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryPairs:
    """Say that a file has the two dims of each rotary pair side by side.

    Of every `period` rows those from `start` on turn: there they are x0 y0 x1 y1 ..., here x0 x1
    ... y0 y1 ..., for here the halves of a head are the pairs.
    """

    period: int
    start: int

    def runs(self, first: int, count: int) -> Iterator[RowRun]:
        """Yield where `count` rows of the parameter from `first` on are in the file."""
        half, end = (self.period - self.start) // 2, first + count
        while first < end:
            head, row = divmod(first, self.period)
            if row < self.start:
                size, there, step = self.start - row, first, 1
            else:
                part, pair = divmod(row - self.start, half)
                size, step = half - pair, 2
                there = head * self.period + self.start + 2 * pair + part
            size = min(size, end - first)
            yield RowRun(here=first, count=size, there=there, step=step)
            first += size


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Say that a file has the rows of several parameters in turns.

    Of every `period` rows there, the `size` from `start` on are of this parameter: so Megatron-core
    has the queries of a key/value head, its keys and its values, then those of the next.
    """

    period: int
    start: int
    size: int

    def runs(self, first: int, count: int) -> Iterator[RowRun]:
        """Yield where `count` rows of the parameter from `first` on are in the file."""
        end = first + count
        while first < end:
            group, row = divmod(first, self.size)
            size = min(self.size - row, end - first)
            there = group * self.period + self.start + row
            yield RowRun(here=first, count=size, there=there, step=1)
            first += size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """Say where a file keeps a parameter.

    It is in the tensor `key`, of `shape` there, from row `start` on (of all dims but the last laid
    out one after the other); where `transposed`, the parameter's dim 0 is the last one there, and
    `start` counts in that. With `pairs` its rows are in another order, with `groups` they are in
    turns with those of other parameters. A `padded` tensor may have more rows there than here, as
    vocabularies have that tensor ranks share out.
    """

    key: str
    shape: tuple[int, ...]
    start: int = 0
    transposed: bool = False
    pairs: RotaryPairs | None = None
    groups: RowGroups | None = None
    padded: bool = False

    def runs(self, first: int, count: int) -> Iterator[RowRun]:
        """Yield where `count` rows of the parameter from `first` on are in the tensor."""
        if self.groups is not None:
            yield from self.groups.runs(first, count)
        elif self.pairs is not None:
            yield from self.pairs.runs(first, count)
        else:
            yield RowRun(here=first, count=count, there=self.start + first, step=1)

    def fits(self, found: tuple[int, ...]) -> bool:
        """Return whether a tensor of the shape `found` is the one that is meant."""
        if not self.padded:
            return found == self.shape
        return found[1:] == self.shape[1:] and bool(found) and found[0] >= self.shape[0]
