# SPDX-License-Identifier: Apache-2.0
"""Pieces of a rectangle of queries and keys that kernels do well: as few as may be.

The rows of a tensor hold runs of positions, one run after another. Between two runs a mask is a
band (`core.attention_mask`); here the bands become full rectangles, causal ones (row i meets the
columns up to i), and, at the edges of a window, small ones with a band; or, for a kernel that takes
any band, one rectangle each. Each visible pair is in one piece, what is wholly masked in none, and
every row of a piece meets a key in it.

Boxes: a band without an upper bound is a full and a causal box. A window is cut into tiles of rows;
where a tile is short beside its window, the keys that all of its rows meet are a full box of their
own, so only the small boxes at both edges need a band. Fewer hidden pairs are computed than a tile
of keys for each row. Full boxes side by side or stacked are joined, causal ones along the diagonal.
All of it is arithmetic on rows and columns, whatever positions they hold: so a rank that meets its
own zigzag chunks needs one causal box, and one full box for those of any other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from echelon.core.attention_mask import AttentionMask, Band, DocumentStarts, PositionRun
from echelon.core.piece_sizes import TRAINING_PIECES


@lru_cache(maxsize=256)
def tiles_between(
    queries: tuple[PositionRun, ...],
    keys: tuple[PositionRun, ...],
    mask: AttentionMask,
    documents: DocumentStarts | None,
    least_rows: int | None = TRAINING_PIECES.tile_rows,
) -> tuple[AttentionTile, ...]:
    """Return the pieces of the rows that hold the runs `queries` and the runs `keys`.

    All runs have the same step. Tiles of a window have `least_rows` or more; None: a window is not
    cut into tiles. Where `documents` is given, attention stays inside of each.
    """
    q_rows, k_rows = _rows(queries), _rows(keys)
    if documents is None:
        return tuple(_boxes(q_rows, k_rows, mask, (0,), least_rows))
    boxes = {
        starts: _boxes(q_rows, k_rows, mask, starts, least_rows)
        for starts in dict.fromkeys(documents)
    }
    first = boxes[documents[0]]
    if all(found == first for found in boxes.values()):
        return tuple(first)
    return tuple(
        replace(box, sequence=sequence)
        for sequence, starts in enumerate(documents)
        for box in boxes[starts]
    )


def _rows(runs: Iterable[PositionRun]) -> list[tuple[int, PositionRun]]:
    """Return each run with its first row; runs that go on where the last one ends are one."""
    found: list[tuple[int, PositionRun]] = []
    row = 0
    for run in runs:
        if found and _follows(run, found[-1][1]):
            first, last = found[-1]
            found[-1] = (first, PositionRun(last.start, last.step, last.count + run.count))
        elif run.count:
            found.append((row, run))
        row += run.count
    return found


def _follows(run: PositionRun, last: PositionRun) -> bool:
    return run.step == last.step and run.start == last.position(last.count)


def _boxes(
    q_rows: Sequence[tuple[int, PositionRun]],
    k_rows: Sequence[tuple[int, PositionRun]],
    mask: AttentionMask,
    starts: tuple[int, ...],
    least_rows: int | None,
) -> list[AttentionTile]:
    """Return the boxes of one sequence whose documents start at `starts`."""
    stop = 1 + max((run.position(run.count) for _, run in (*q_rows, *k_rows)), default=0)
    boxes: list[AttentionTile] = []
    for start, end in zip(starts, (*starts[1:], stop), strict=True):
        in_q, in_k = _inside(q_rows, start, end), _inside(k_rows, start, end)
        for q_row, q in in_q:
            for k_row, k in in_k:
                rows, columns = slice(q_row, q_row + q.count), slice(k_row, k_row + k.count)
                box = AttentionTile(rows, columns, mask.band(q, k))
                if least_rows is None:
                    boxes += filter(None, (box.trimmed(),))
                else:
                    boxes += tile_box(box, least_rows)
    return join_boxes(boxes)


def _inside(
    rows: Iterable[tuple[int, PositionRun]], start: int, stop: int
) -> list[tuple[int, PositionRun]]:
    """Return what of the runs lies at positions from `start` up to but without `stop`."""
    cuts = ((row, run, *run.between(start, stop)) for row, run in rows)
    return [(row + a, run.cut(a, b)) for row, run, a, b in cuts if a < b]


FULL = Band(None, None)
CAUSAL = Band(0, None)

KernelForm = Literal["full", "causal", "banded"]


def kernel_form(band: Band, num_queries: int, num_keys: int) -> KernelForm:
    """Return what a kernel is asked for: all pairs, those with j <= i, or those of a band."""
    if band.covers(num_queries, num_keys):
        return "full"
    unbounded = band.high is None or band.high >= num_queries - 1
    return "causal" if band.low == 0 and unbounded else "banded"


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Name rows `q` and columns `k`, and the visible band between them: what one kernel call does.

    The band counts from the first row and the first column. `sequence` is its place in the batch;
    None: all of them.
    """

    q: slice
    k: slice
    band: Band
    sequence: int | None = None

    @property
    def sequences(self) -> slice:
        """Return the range of sequences."""
        return slice(None) if self.sequence is None else slice(self.sequence, self.sequence + 1)

    @property
    def num_queries(self) -> int:
        """Return the number of query rows."""
        return self.q.stop - self.q.start

    @property
    def num_keys(self) -> int:
        """Return the number of key columns."""
        return self.k.stop - self.k.start

    @property
    def form(self) -> KernelForm:
        """Return what a kernel is asked for."""
        return kernel_form(self.band, self.num_queries, self.num_keys)

    def covers(self, num_queries: int, num_keys: int) -> bool:
        """Return whether all rows and columns of all sequences are in this piece."""
        everything = (slice(0, num_queries), slice(0, num_keys))
        return self.sequence is None and (self.q, self.k) == everything

    def rows(self, first: int, last: int) -> AttentionTile:
        """Return the rows from `first` up to but without `last`, counted from the first row."""
        rows = slice(self.q.start + first, self.q.start + last)
        return replace(self, q=rows, band=self.band.shifted(first, 0))

    def columns(self, first: int, last: int) -> AttentionTile:
        """Return the columns from `first` up to but without `last`."""
        columns = slice(self.k.start + first, self.k.start + last)
        return replace(self, k=columns, band=self.band.shifted(0, first))

    def trimmed(self) -> AttentionTile | None:
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
        return replace(box, band=Band(low, high))


TILES_PER_WINDOW = 4  # tiles
MIN_MIDDLE_TILES = 3
"""The middle is worth two more calls where it is this many tiles wide; else the band is one box."""


def tile_box(box: AttentionTile, least_rows: int) -> Iterator[AttentionTile]:
    """Yield the visible part of a box as full, causal and banded boxes.

    Those of a window have `least_rows` or more, but for the last.
    """
    trimmed = box.trimmed()
    if trimmed is None:
        return
    low, high = trimmed.band.low, trimmed.band.high
    if high is None:
        yield from _unbounded(trimmed, least_rows)
        return
    width = trimmed.num_keys if low is None else high - low + 1
    size = max(least_rows, width // TILES_PER_WINDOW)
    first = 0
    if low is not None and high + 1 >= size:
        # The window of the first rows reaches back beyond the first key.
        first = min(high + 1, trimmed.num_queries)
        yield from tile_box(trimmed.rows(0, first), least_rows)
    while first < trimmed.num_queries:
        last = min(first + size, trimmed.num_queries)
        yield from _tile(trimmed.rows(first, last), size, least_rows)
        first = last


def _unbounded(box: AttentionTile, least_rows: int) -> Iterator[AttentionTile]:
    """Yield a trimmed box without an upper bound: what all rows meet, then a causal box."""
    ahead = -(box.band.low or 0)
    if ahead and box.band.low is not None:
        yield from tile_box(box.columns(0, ahead), least_rows)
        yield from tile_box(box.columns(ahead, box.num_keys), least_rows)
    else:
        yield box


def _tile(rows: AttentionTile, size: int, least_rows: int) -> Iterator[AttentionTile]:
    """Yield one tile of rows of a window: whole, or as its two edges and what lies between."""
    box = rows.trimmed()
    if box is None:
        return
    low, high = box.band.low, box.band.high
    if high is None:
        yield from _unbounded(box, least_rows)
        return
    first = max(0, box.num_queries - 1 - high)
    last = box.num_keys if low is None else min(box.num_keys, -low)
    if last - first < MIN_MIDDLE_TILES * size:
        yield box
        return
    parts = (box.columns(0, first), box.columns(first, last), box.columns(last, box.num_keys))
    yield from filter(None, (part.trimmed() for part in parts))


def join_boxes(boxes: Iterable[AttentionTile]) -> list[AttentionTile]:
    """Return the same pairs in fewer boxes, those of many rows first."""
    by_form: dict[str, list[AttentionTile]] = {"full": [], "causal": [], "banded": []}
    for box in boxes:
        by_form[box.form].append(box)
    full = _side_by_side(by_form["full"])
    causal, full = _along_diagonal(by_form["causal"], full)
    found = [*_stacked(full), *causal, *by_form["banded"]]
    return sorted(found, key=lambda box: (-box.num_queries, box.q.start, box.k.start))


def _side_by_side(full: list[AttentionTile]) -> list[AttentionTile]:
    """Join full boxes of the same rows whose columns adjoin."""
    found: list[AttentionTile] = []
    for box in sorted(full, key=lambda box: (box.q.start, box.q.stop, box.k.start)):
        last = found[-1] if found else None
        if last and last.q == box.q and last.k.stop == box.k.start:
            found[-1] = AttentionTile(box.q, slice(last.k.start, box.k.stop), FULL)
        else:
            found.append(box)
    return found


def _stacked(full: list[AttentionTile]) -> list[AttentionTile]:
    """Join full boxes of the same columns whose rows adjoin."""
    turned = _side_by_side([AttentionTile(box.k, box.q, FULL) for box in full])
    return [AttentionTile(box.k, box.q, FULL) for box in turned]


def _along_diagonal(
    causal: list[AttentionTile], full: list[AttentionTile]
) -> tuple[list[AttentionTile], list[AttentionTile]]:
    """Join a causal square, the one at its lower right corner, and the full box below the first.

    The full box may be a part of a wider one: the rest of that remains.
    """
    rows_of: defaultdict[tuple[int, int], list[AttentionTile]] = defaultdict(list)
    for box in full:
        rows_of[box.q.start, box.q.stop].append(box)
    found: list[AttentionTile] = []
    by_corner: dict[tuple[int, int], int] = {}
    for box in sorted(causal, key=lambda box: box.q.start):
        joins, at = box, by_corner.pop((box.q.start, box.k.start), None)
        upper = None if at is None else found[at]
        if at is not None and upper and _take(rows_of[box.q.start, box.q.stop], upper):
            rows, columns = slice(upper.q.start, box.q.stop), slice(upper.k.start, box.k.stop)
            joins = found[at] = AttentionTile(rows, columns, CAUSAL)
        else:
            at = len(found)
            found.append(box)
        if joins.num_queries == joins.num_keys:
            by_corner[joins.q.stop, joins.k.stop] = at
    return found, [box for boxes in rows_of.values() for box in boxes]


def _take(full: list[AttentionTile], upper: AttentionTile) -> bool:
    """Take the columns of `upper` out of the full boxes of one set of rows, if they are there."""
    for place, box in enumerate(full):
        if box.k.start <= upper.k.start and upper.k.stop <= box.k.stop:
            first, last = upper.k.start - box.k.start, upper.k.stop - box.k.start
            rests = (box.columns(0, first), box.columns(last, box.num_keys))
            full[place : place + 1] = [rest for rest in rests if rest.num_keys]
            return True
    return False
