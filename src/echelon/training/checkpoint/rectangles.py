# SPDX-License-Identifier: Apache-2.0
"""Rectangles of a tensor: where two meet, and whether many of them are the whole, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Hold where a rectangle starts and how far it reaches, one number per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Return the first index past the rectangle, per dim."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """Return what is in both, or None where nothing is."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a, b) - start for a, b, start in zip(self.end, other.end, offset, strict=True)
        )
        return Rectangle(offset, shape) if all(size > 0 for size in shape) else None

    def slices_within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Return the slices that cut this rectangle out of an `outer` one that contains it."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def covering_problem(shape: tuple[int, ...], pieces: Sequence[Rectangle]) -> str:
    """Return why `pieces` are not the whole of a tensor of `shape`, each element once; or ""."""
    for piece in pieces:
        if len(piece.offset) != len(shape) or len(piece.shape) != len(shape):
            return f"a piece with {len(piece.offset)} dims, of a tensor with {len(shape)}"
        inside = all(
            0 <= a < b <= n for a, b, n in zip(piece.offset, piece.end, shape, strict=True)
        )
        if not inside:
            return f"the piece {_spell(piece)} is not inside {list(shape)}"
    open_pieces: list[Rectangle] = []
    for piece in sorted(pieces, key=lambda p: p.offset):
        # Pieces come by their first row, so those that ended above this row are done with.
        open_pieces = [p for p in open_pieces if not shape or p.end[0] > piece.offset[0]]
        for earlier in open_pieces:
            if earlier.intersection(piece):
                return f"the pieces {_spell(earlier)} and {_spell(piece)} overlap"
        open_pieces.append(piece)
    covered = sum(piece.numel for piece in pieces)
    if covered != prod(shape):
        return f"{len(pieces)} pieces hold {covered} of {prod(shape)} elements of {list(shape)}"
    return ""


def _spell(piece: Rectangle) -> str:
    spans = (f"{a}:{b}" for a, b in zip(piece.offset, piece.end, strict=True))
    return f"[{', '.join(spans)}]"
