# SPDX-License-Identifier: Apache-2.0
"""What of a rectangle of queries and keys is to be computed, as few pieces that kernels do well.

The rows of a tensor hold runs of positions, one run after another. Between two runs a mask is a
band (`core.attention_mask`); here the bands become full rectangles, causal ones (row i meets the
columns up to i), and, at the edges of a window, small ones with a band; or, for a kernel that takes
any band, one rectangle each. Each visible pair is in one piece, what is wholly masked in none, and
every row of a piece meets a key in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from echelon.core.attention_mask import AttentionMask, DocumentStarts, PositionRun
from echelon.layout.attention_boxes import AttentionTile, join_boxes, tile_box

TILE_ROWS = 192
"""Rows of a tile of a window, at the least. PyTorch's kernel on CPU takes 64 rows at a time from
here on, 32 below."""


@lru_cache(maxsize=256)
def tiles_between(
    queries: tuple[PositionRun, ...],
    keys: tuple[PositionRun, ...],
    mask: AttentionMask,
    documents: DocumentStarts | None,
    least_rows: int | None = TILE_ROWS,
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
