"""What of a rectangle of queries and keys is to be computed, as few pieces that kernels do well.

The rows of a tensor hold runs of positions, one run after another. Between two runs a mask is a
band (`core.attention_mask`); here the bands become full rectangles, causal ones (row i meets the
columns up to i), and, at the edges of a window, small ones with a band. Each visible pair is in
one piece, what is wholly masked in none, and every row of a piece meets a key in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.core.attention_mask import AttentionMask, Band, DocumentStarts, Run
from echelon.models.attention.boxes import Box, Form, form_of
from echelon.models.attention.joining import joined
from echelon.models.attention.tiling import tiled


@dataclass(frozen=True, slots=True)
class Piece:
    """Name the rows and columns of one kernel call: row i of `q` meets row j of `k` by `band`.

    `sequence` is its place in the batch; None: all of them.
    """

    sequence: int | None
    q: slice
    k: slice
    band: Band

    @classmethod
    def of(cls, sequence: int | None, box: Box) -> Piece:
        """Return a box of one sequence, or of all of them."""
        rows, columns = slice(box.q_first, box.q_last), slice(box.k_first, box.k_last)
        return cls(sequence, rows, columns, box.band)

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
        """Return the number of key rows."""
        return self.k.stop - self.k.start

    @property
    def full(self) -> bool:
        """Return whether every query meets every key."""
        return self.form == "full"

    @property
    def form(self) -> Form:
        """Return what a kernel is asked for."""
        return form_of(self.band, self.num_queries, self.num_keys)

    @property
    def causal(self) -> bool:
        """Return whether query i meets just the keys up to i, counted from the top left."""
        return self.form == "causal"

    def covers(self, num_queries: int, num_keys: int) -> bool:
        """Return whether all rows of all sequences are in this piece."""
        everything = (slice(0, num_queries), slice(0, num_keys))
        return self.sequence is None and (self.q, self.k) == everything


@lru_cache(maxsize=256)
def pieces_between(
    queries: tuple[Run, ...],
    keys: tuple[Run, ...],
    mask: AttentionMask,
    documents: DocumentStarts | None,
) -> tuple[Piece, ...]:
    """Return the pieces of the rows that hold the runs `queries` and the runs `keys`.

    All runs have the same step. Where `documents` is given, attention stays inside of each.
    """
    q_rows, k_rows = _rows(queries), _rows(keys)
    if documents is None:
        return _pieces(None, _boxes(q_rows, k_rows, mask, (0,)))
    boxes = {starts: _boxes(q_rows, k_rows, mask, starts) for starts in dict.fromkeys(documents)}
    first = boxes[documents[0]]
    if all(found == first for found in boxes.values()):
        return _pieces(None, first)
    return tuple(
        piece
        for sequence, starts in enumerate(documents)
        for piece in _pieces(sequence, boxes[starts])
    )


def _pieces(sequence: int | None, boxes: Iterable[Box]) -> tuple[Piece, ...]:
    return tuple(Piece.of(sequence, box) for box in boxes)


def _rows(runs: Iterable[Run]) -> list[tuple[int, Run]]:
    """Return each run with its first row; runs that go on where the last one ends are one."""
    found: list[tuple[int, Run]] = []
    row = 0
    for run in runs:
        if found and _follows(run, found[-1][1]):
            first, last = found[-1]
            found[-1] = (first, Run(last.start, last.step, last.count + run.count))
        elif run.count:
            found.append((row, run))
        row += run.count
    return found


def _follows(run: Run, last: Run) -> bool:
    return run.step == last.step and run.start == last.position(last.count)


def _boxes(
    q_rows: Sequence[tuple[int, Run]],
    k_rows: Sequence[tuple[int, Run]],
    mask: AttentionMask,
    starts: tuple[int, ...],
) -> list[Box]:
    """Return the boxes of one sequence whose documents start at `starts`."""
    stop = 1 + max((run.position(run.count) for _, run in (*q_rows, *k_rows)), default=0)
    boxes: list[Box] = []
    for start, end in zip(starts, (*starts[1:], stop), strict=True):
        in_q, in_k = _inside(q_rows, start, end), _inside(k_rows, start, end)
        boxes += [
            box
            for q_row, q in in_q
            for k_row, k in in_k
            for box in tiled(Box(q_row, q_row + q.count, k_row, k_row + k.count, mask.band(q, k)))
        ]
    return joined(boxes)


def _inside(rows: Iterable[tuple[int, Run]], start: int, stop: int) -> list[tuple[int, Run]]:
    """Return what of the runs lies at positions from `start` up to but without `stop`."""
    cuts = ((row, run, *run.between(start, stop)) for row, run in rows)
    return [(row + a, run.cut(a, b)) for row, run, a, b in cuts if a < b]
