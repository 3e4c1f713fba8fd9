"""A rectangle of query rows and key columns, and the band of it that is visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.core.attention_mask import Band

FULL = Band(None, None)
CAUSAL = Band(0, None)

Form = Literal["full", "causal", "banded"]


def form_of(band: Band, num_queries: int, num_keys: int) -> Form:
    """Return what a kernel is asked for: all pairs, those with j <= i, or those of a band."""
    if band.covers(num_queries, num_keys):
        return "full"
    unbounded = band.high is None or band.high >= num_queries - 1
    return "causal" if band.low == 0 and unbounded else "banded"


@dataclass(frozen=True, slots=True)
class Box:
    """Name rows and columns by their range, [first, last), and the visible band between them.

    The band counts from the first row and the first column.
    """

    q_first: int
    q_last: int
    k_first: int
    k_last: int
    band: Band

    @property
    def num_queries(self) -> int:
        """Return the number of rows."""
        return self.q_last - self.q_first

    @property
    def num_keys(self) -> int:
        """Return the number of columns."""
        return self.k_last - self.k_first

    @property
    def form(self) -> Form:
        """Return what a kernel is asked for."""
        return form_of(self.band, self.num_queries, self.num_keys)

    def rows(self, first: int, last: int) -> Box:
        """Return the rows from `first` up to but without `last`, counted from the first row."""
        band = self.band.shifted(first, 0)
        return Box(self.q_first + first, self.q_first + last, self.k_first, self.k_last, band)

    def columns(self, first: int, last: int) -> Box:
        """Return the columns from `first` up to but without `last`."""
        band = self.band.shifted(0, first)
        return Box(self.q_first, self.q_last, self.k_first + first, self.k_first + last, band)

    def trimmed(self) -> Box | None:
        """Return the box without rows and columns that see nothing; None: nothing is visible.

        A bound of its band that bounds nothing is None.
        """
        low, high = self.band.low, self.band.high
        if low is not None and high is not None and low > high:
            return None
        first = 0 if low is None else max(0, low)
        last = self.num_queries if high is None else min(self.num_queries, self.num_keys + high)
        if first >= last:
            return None
        box = self.rows(first, last)
        box = box.columns(*box.band.keys(box.num_queries, box.num_keys))
        low, high = box.band.low, box.band.high
        low = None if low is None or low <= 1 - box.num_keys else low
        high = None if high is None or high >= box.num_queries - 1 else high
        return Box(box.q_first, box.q_last, box.k_first, box.k_last, Band(low, high))
