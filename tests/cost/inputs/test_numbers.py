"""Numbers and arrays of plans in one record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echelon.cost.inputs.numbers import LayoutNumbers, ceil_div, stacked_layouts
from tests.cost.seconds.small_work import MIXTURE, MODEL


def test_degrees_multiply() -> None:
    layout = LayoutNumbers(tp=2.0, cp=3.0, pp=4.0, dp_shard=5.0, dp_replicate=6.0)
    assert (layout.dp, layout.devices, layout.shard) == (30.0, 720.0, 15.0)


def test_a_dense_model_has_no_mixtures() -> None:
    assert MODEL.mixture_layers == 0.0
    assert replace(MIXTURE, dense_layers=3.0).mixture_layers == 5.0


def test_division_rounds_up() -> None:
    found = ceil_div(np.array([8.0, 9.0, 0.0]), 4.0)
    assert np.asarray(found).tolist() == [2.0, 3.0, 0.0]


def test_layouts_are_stacked_where_they_differ() -> None:
    both = stacked_layouts([LayoutNumbers(tp=2.0, pp=4.0), LayoutNumbers(tp=2.0, pp=8.0)])
    assert (both.tp, both.cp) == (2.0, 1.0)
    assert np.array_equal(np.asarray(both.pp), [4.0, 8.0])
