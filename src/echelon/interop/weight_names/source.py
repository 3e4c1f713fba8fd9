# SPDX-License-Identifier: Apache-2.0
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
class HeadRows:
    """Say where a file has the rows of heads of `width`, and in which order those of one.

    There the first `turned` rows of a head turn with the position, in two halves, or pair by pair
    where they are `interleaved`; all others follow. Here the halves of the whole head are the
    pairs, each with what turns first. There a group of `heads` heads has `group_rows` rows, its
    own from the first one on; the first group begins at row `start`.
    """

    width: int
    turned: int = 0
    interleaved: bool = False
    heads: int = 1
    group_rows: int | None = None
    start: int = 0

    @property
    def in_order(self) -> bool:
        """Return whether the rows of a head are in the same order there."""
        return self.turned in (0, self.width) and not self.interleaved

    def runs(self, first: int, count: int) -> Iterator[RowRun]:
        """Yield where `count` rows of the parameter from `first` on are in the file."""
        half, turned, end = self.width // 2, self.turned // 2, first + count
        group_rows = self.heads * self.width if self.group_rows is None else self.group_rows
        while first < end:
            head, row = divmod(first, self.width)
            group, place = divmod(head, self.heads)
            base, step = self.start + group * group_rows + place * self.width, 1
            part, pair = divmod(row, half) if not self.in_order else (0, row)
            if self.in_order:
                size, there = self.width - row, row
            elif pair >= turned:
                size, there = half - pair, self.turned + part * (half - turned) + pair - turned
            elif self.interleaved:
                size, there, step = turned - pair, 2 * pair + part, 2
            else:
                size, there = turned - pair, part * turned + pair
            size = min(size, end - first)
            yield RowRun(here=first, count=size, there=base + there, step=step)
            first += size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """Say where a file keeps a parameter: in which tensor, from where on, and in which order."""

    key: str
    """The tensor."""
    shape: tuple[int, ...]
    """Its shape there."""
    start: int = 0
    """The row from which on it is there, of all dims but the last laid out one after the other;
    where `transposed`, the column."""
    transposed: bool = False
    """Whether the parameter's dim 0 is the last one there."""
    row: int = 0
    """Where `transposed`: the row from which on its dim 1 is there."""
    step: int = 1
    """It has each so many-th row, or column, from `start` on."""
    order: RotaryPairs | HeadRows | None = None
    """Another order of its rows, which says where they begin, too."""
    offset: float = 0.0
    """How much less the file keeps than its values."""
    padded: bool = False
    """Whether the tensor may have more rows there than here, as vocabularies have that tensor ranks
    share out."""

    def runs(self, first: int, count: int) -> Iterator[RowRun]:
        """Yield where `count` rows of the parameter from `first` on are in the tensor."""
        if self.order is None:
            there = self.start + first * self.step
            yield RowRun(here=first, count=count, there=there, step=self.step)
        else:
            yield from self.order.runs(first, count)

    def fits(self, found: tuple[int, ...]) -> bool:
        """Return whether a tensor of the shape `found` is the one that is meant."""
        if not self.padded:
            return found == self.shape
        return found[1:] == self.shape[1:] and bool(found) and found[0] >= self.shape[0]
