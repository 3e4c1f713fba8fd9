"""Pieces of tensor ranks cover a parameter once."""

from __future__ import annotations

import pytest

from echelon.layout.modules.tensor import TensorPiece


@pytest.mark.parametrize(("parts", "degree"), [((37,), 2), ((37,), 4), ((8, 4, 4), 4), ((6, 6), 3)])
def test_ranges_cover_everything_once(parts: tuple[int, ...], degree: int) -> None:
    piece = TensorPiece(name="w", shape=(3, sum(parts)), dim=1, parts=parts)
    seen = [
        place
        for index in range(degree)
        for first, last in piece.ranges(degree, index)
        for place in range(first, last)
    ]
    assert sorted(seen) == list(range(sum(parts)))
    assert piece.local_shape(degree) == (3, sum(-(-part // degree) for part in parts))
    assert piece.numel == 3 * sum(parts)
