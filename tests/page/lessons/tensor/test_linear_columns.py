"""A layer cut by columns: parts are complete, side by side they are the whole product."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.terms import all_gather_bytes
from echelon.page.lessons.matrices import numel
from echelon.page.lessons.tensor.linear import column_layer, column_parallel, up
from tests.page.lessons.shown import diagrams, facts, numbers, tiles, tiles_of


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.system("S58")
def test_what_is_drawn_multiplies(degree: int) -> None:
    frames = column_parallel().scene(ranks=str(degree)).frames
    assert len(frames) == 5
    compute, gathered = frames[2], tiles(frames[4])
    outputs = []
    for rank in range(degree):
        group = f"rank {rank}"
        (x,) = tiles_of(compute, "X", group)
        (w,) = tiles_of(compute, f"W{rank}", group)
        (y,) = tiles_of(compute, f"Y{rank} = X W{rank}", group)
        outputs.append(np.array(numbers(x.label)) @ np.array(numbers(w.label)))
        assert np.array_equal(outputs[-1], np.array(numbers(y.label)))
        assert y.state == "whole"
    whole = np.concatenate(outputs, axis=1)
    for rank in range(degree):
        there = [np.array(numbers(gathered[f"y{one}-{rank}"].label)) for one in range(degree)]
        assert np.array_equal(np.concatenate(there, axis=1), whole)
    compared = [np.array(numbers(one.label)) for one in tiles_of(frames[3], "Y = X W")]
    assert np.array_equal(np.concatenate(compared, axis=1), whole)
    assert facts(frames[3])["equal to one device"] == "yes"


@pytest.mark.parametrize("degree", [2, 4])
def test_only_the_gather_sends_and_its_bytes_are_those_of_the_formula(degree: int) -> None:
    frames = column_parallel().scene(ranks=str(degree)).frames
    assert [facts(one)["a rank sends"] for one in frames[:4]] == ["0 B"] * 4
    piece = numel(column_layer(degree).outputs[0]) * 2
    assert facts(frames[4])["a rank sends"] == decimal_bytes(all_gather_bytes(piece, degree))
    (board,) = diagrams(frames[4])
    assert len(board.moves) == degree * (degree - 1)


def test_shapes_are_those_of_the_guide() -> None:
    # W [H, 4H] over four ranks: [H, H] each, and [B, S, 4H] together.
    layer = column_layer(4)
    assert up().local_shape(4) == (2, 2)
    assert [len(one[0]) for one in layer.parts] == [2] * 4
    assert len(layer.weight[0]) == 4 * len(layer.x[0])
