"""Ranges of a flattened tensor as rectangles of the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a rectangle."""


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Place]:
    """Yield the fewest rectangles that are elements `start` to `stop` - 1 of a row-major tensor.

    They come in the order of the elements, and each is a contiguous run of them: for a matrix the
    rest of a row, whole rows, and the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:
        yield from _within_row(shape, first - 1, start, stop)
        return
    if start < first * inner:
        yield from _within_row(shape, first - 1, start, first * inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _within_row(shape, last, last * inner, stop)


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Place]:
    base = row * prod(shape[1:])
    for offset, size in rectangles(shape[1:], start - base, stop - base):
        yield (row, *offset), (1, *size)
