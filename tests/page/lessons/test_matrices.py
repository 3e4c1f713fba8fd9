"""Matrices of whole numbers: products, cuts by the engine's ranges, and how they are written."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.page.lessons.matrices import (
    added,
    beside,
    block,
    columns_of,
    cut,
    dot_text,
    filled,
    matrix_text,
    mlp_weights,
    numel,
    product,
    rectified,
    shape_text,
    sum_text,
)


def test_products_and_sums_are_those_of_numpy() -> None:
    left, right = filled(3, 4, 7), filled(4, 5, 1)
    assert np.array_equal(np.array(product(left, right)), np.array(left) @ np.array(right))
    assert np.array_equal(np.array(added([left, left, left])), 3 * np.array(left))
    assert np.array_equal(np.array(rectified(left)), np.maximum(0, np.array(left)))
    with pytest.raises(ValueError, match="shorter"):
        product(left, left)


def test_numbers_are_small_and_not_all_alike() -> None:
    found = {x for seed in range(1, 8) for row in filled(4, 8, seed) for x in row}
    assert found == {-2, -1, 0, 1, 2}
    assert filled(2, 8, 3) == filled(2, 8, 3)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_parts_of_a_cut_are_the_whole_and_their_products_add_up(degree: int) -> None:
    up, down = mlp_weights(4, 8)
    x, first, second = filled(2, 4, 7), filled(4, 8, 1), filled(8, 4, 6)
    columns, rows = cut(up, first, degree), cut(down, second, degree)
    assert beside(columns) == first
    assert tuple(row for part in rows for row in part) == second
    assert [(len(one[0]), len(one)) for one in columns] == [up.local_shape(degree)] * degree
    inner = product(x, first)
    size = len(inner[0]) // degree
    inputs = [columns_of(inner, rank * size, (rank + 1) * size) for rank in range(degree)]
    parts = [product(one, part) for one, part in zip(inputs, rows, strict=True)]
    assert added(parts) == product(inner, second)


def test_a_block_is_written_in_lines_and_heard_with_its_shape() -> None:
    tile = block("w", "W", ((1, -2), (10, 0)), kind=3, column=1)
    assert tile.label == " 1 -2\n10  0"
    assert tile.words == "W, [2, 2]"
    assert (tile.kind, tile.column, tile.state) == (3, 1, "whole")
    assert matrix_text(((1, 2),)) == "1 2"
    assert shape_text(filled(2, 8, 1)) == "[2, 8]"
    assert numel(filled(2, 8, 1)) == 16


def test_sums_are_written_out() -> None:
    assert dot_text(((1, 2),), ((3,), (-1,))) == "1 x 3 + 2 x (-1) = 1"
    assert sum_text([3, -1, 0]) == "3 + (-1) + 0 = 2"
