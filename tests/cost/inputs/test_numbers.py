"""Numbers and arrays of plans in one record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echelon.cost.inputs.numbers import LayoutNumbers, ceil_div, stacked_layouts, take_entries
from tests.cost.seconds.small_work import INSIDE, MACHINE, MIXTURE, MODEL


def test_records_of_many_plans_are_cut_like_arrays() -> None:
    layout = LayoutNumbers(tp=np.array([1.0, 2.0]), pp=4.0)
    one = take_entries(layout, 1)
    assert (one.tp, one.pp) == (2.0, 4.0)


def test_records_inside_of_records_are_cut_too() -> None:
    tiers = (replace(INSIDE, bandwidth=np.array([1e9, 2e9, 3e9])),)
    found = take_entries(replace(MACHINE, tiers=tiers), np.array([True, False, True]))
    assert np.asarray(found.tiers[0].bandwidth).tolist() == [1e9, 3e9]
    assert found.peak_flops == MACHINE.peak_flops


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
    assert take_entries(both, 1) == LayoutNumbers(tp=2.0, pp=8.0)
