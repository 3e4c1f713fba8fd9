"""Flat ranges as rectangles: every element once, in order, as few as can be."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.storage.weights import range_as_rectangles


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_rectangles_are_the_elements_of_the_range_in_order(
    shape: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    whole = torch.arange(prod(shape)).view(shape)
    found: list[int] = []
    for offset, size in range_as_rectangles(shape, start, stop):
        part = whole[tuple(slice(a, a + b) for a, b in zip(offset, size, strict=True))]
        assert part.shape == torch.Size(size)
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 12, [((0, 0), (3, 4))]),
        (4, 8, [((1, 0), (1, 4))]),
        (5, 7, [((1, 1), (1, 2))]),
        (3, 9, [((0, 3), (1, 1)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]),
        (3, 5, [((0, 3), (1, 1)), ((1, 0), (1, 1))]),
        (7, 7, []),
    ],
)
def test_a_slice_of_a_matrix_is_at_most_three_rectangles(
    start: int, stop: int, expected: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    assert list(range_as_rectangles((3, 4), start, stop)) == expected
