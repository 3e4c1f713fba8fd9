"""A band cut into boxes that kernels do well.

What has no upper bound is a full and a causal box. A window is cut into tiles of rows; where a
tile is short beside its window, the keys that all of its rows meet are a full box of their own, so
only the small boxes at both edges need a band. What is computed and hidden again is less than a
tile of keys for each row.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.models.attention.boxes import Box

MIN_TILE_ROWS = 192
"""PyTorch's kernel on CPU takes 64 rows at a time from here on, 32 below."""
TILES_PER_WINDOW = 4
MIN_MIDDLE_TILES = 3
"""The middle is worth two more calls where it is this many tiles wide; else the band is one box."""


def tiled(box: Box) -> Iterator[Box]:
    """Yield the visible part of a box as full, causal and banded boxes."""
    trimmed = box.trimmed()
    if trimmed is None:
        return
    low, high = trimmed.band.low, trimmed.band.high
    if high is None:
        yield from _unbounded(trimmed)
        return
    width = trimmed.num_keys if low is None else high - low + 1
    size = max(MIN_TILE_ROWS, width // TILES_PER_WINDOW)
    first = 0
    if low is not None and high + 1 >= size:
        # The window of the first rows reaches back beyond the first key.
        first = min(high + 1, trimmed.num_queries)
        yield from tiled(trimmed.rows(0, first))
    while first < trimmed.num_queries:
        last = min(first + size, trimmed.num_queries)
        yield from _tile(trimmed.rows(first, last), size)
        first = last


def _unbounded(box: Box) -> Iterator[Box]:
    """Yield a trimmed box without an upper bound: what all rows meet, then a causal box."""
    ahead = -(box.band.low or 0)
    if ahead and box.band.low is not None:
        yield from tiled(box.columns(0, ahead))
        yield from tiled(box.columns(ahead, box.num_keys))
    else:
        yield box


def _tile(rows: Box, size: int) -> Iterator[Box]:
    """Yield one tile of rows of a window: whole, or as its two edges and what lies between."""
    box = rows.trimmed()
    if box is None:
        return
    low, high = box.band.low, box.band.high
    if high is None:
        yield from _unbounded(box)
        return
    first = max(0, box.num_queries - 1 - high)
    last = box.num_keys if low is None else min(box.num_keys, -low)
    if last - first < MIN_MIDDLE_TILES * size:
        yield box
        return
    for part in (box.columns(0, first), box.columns(first, last), box.columns(last, box.num_keys)):
        visible = part.trimmed()
        if visible is not None:
            yield visible
