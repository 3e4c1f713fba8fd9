"""A layer cut by rows: each rank has a summand of every number, and the sum is the product."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.terms import all_reduce_bytes
from echelon.page.lessons.tensor.linear import down, row_parallel
from tests.page.lessons.shown import facts, numbers, tiles, tiles_of


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.system("S58")
def test_what_is_drawn_multiplies_and_adds_up(degree: int) -> None:
    frames = row_parallel().scene(ranks=str(degree)).frames
    assert len(frames) == 5
    compute, total = frames[2], np.zeros((2, 2), dtype=int)
    for rank in range(degree):
        group = f"rank {rank}"
        (x,) = tiles_of(compute, f"X{rank}", group)
        (w,) = tiles_of(compute, f"W{rank}", group)
        (y,) = tiles_of(compute, f"X{rank} W{rank}", group)
        part = np.array(numbers(x.label)) @ np.array(numbers(w.label))
        assert np.array_equal(part, np.array(numbers(y.label)))
        assert y.state == "part"
        total += part
    (whole,) = tiles_of(frames[3], "Y = X W")
    assert np.array_equal(np.array(numbers(whole.label)), total)
    last = tiles(frames[4])
    for rank in range(degree):
        assert np.array_equal(np.array(numbers(last[f"total{rank}"].label)), total)
        assert last[f"total{rank}"].state == "whole"
    assert facts(frames[3])["sum equal to one device"] == "yes"
    assert facts(frames[3])["first number of Y"] == str(total[0][0])


@pytest.mark.parametrize("degree", [2, 4])
def test_the_sum_sends_what_the_formula_says(degree: int) -> None:
    frames = row_parallel().scene(ranks=str(degree)).frames
    assert facts(frames[4])["a rank sends"] == decimal_bytes(all_reduce_bytes(4 * 2, degree))


def test_rows_are_cut_as_the_engine_cuts_them() -> None:
    assert down().split_dim == 1
    assert down().local_shape(4) == (2, 2)
