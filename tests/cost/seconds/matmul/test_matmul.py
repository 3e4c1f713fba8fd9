"""Products of matrices: what tiles, waves, depth and rows that are not aligned lose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.cost.seconds.matmul import alignment_efficiency, matmul_seconds, memory_seconds
from tests.cost.seconds.small_work import MACHINE

TILED = replace(MACHINE, tile=64.0, units=4.0)
WHOLE_S = 2 * 128 * 64 * 128 / 1e12


def test_whole_tiles_on_all_units_lose_nothing() -> None:
    assert matmul_seconds(TILED, 128.0, 64.0, 128.0, 2.0) == pytest.approx(WHOLE_S)


def test_one_row_more_begins_tiles_and_a_wave() -> None:
    # 3 x 2 tiles on 4 units: 6 of 8 places in two waves, and half of the idle ones put to work.
    found = matmul_seconds(TILED, 129.0, 64.0, 128.0, 2.0)
    assert found == pytest.approx(2 * 6 * 64**3 / 1e12 * 8 / 7)


def test_a_product_of_the_half_depth_reaches_half_of_the_rate() -> None:
    deep = replace(TILED, half_depth=64.0)
    assert matmul_seconds(deep, 128.0, 64.0, 128.0, 2.0) == pytest.approx(2 * WHOLE_S)


def test_a_thin_product_takes_as_long_as_its_memory() -> None:
    slow = replace(TILED, memory_bandwidth=1e9, memory=0.5)
    moved = 2.0 * (128 * 64 + 64 * 128 + 128 * 128)
    assert matmul_seconds(slow, 128.0, 64.0, 128.0, 2.0) == pytest.approx(moved / 5e8)
    assert memory_seconds(slow, 1e9) == pytest.approx(2.0)


def test_each_halving_of_the_alignment_costs_a_factor() -> None:
    machine = replace(MACHINE, aligned=0.9)
    found = alignment_efficiency(machine, np.array([128.0, 64.0, 32.0, 8.0, 4.0, 3.0]))
    # Below 8 elements a load is no longer one instruction.
    assert found == pytest.approx([1, 1, 0.9, 0.9**3, 0.4 * 0.9**4, 0.4 * 0.9**6])
    assert alignment_efficiency(MACHINE, np.array([3.0])) == pytest.approx([1.0])
