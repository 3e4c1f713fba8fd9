"""Formulas over rows give for each row what they give for it alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from echelon.planner.search.formulas import (
    VectorizedFormulas,
    broadcast_to_array,
    take_nested_entries,
)
from echelon.planner.search.legal_meshes import Legality, legal_meshes
from tests.planner.requests import small


@dataclass
class Inner:
    values: np.ndarray[tuple[int], np.dtype[np.float64]]
    same: float


@dataclass
class Outer:
    inner: Inner
    twice: Inner
    number: int


def test_entries_are_taken_from_nested_records_once() -> None:
    inner = Inner(values=np.array([1.0, 2.0, 3.0]), same=7.0)
    found = take_nested_entries(
        Outer(inner=inner, twice=inner, number=2), np.array([2, 0], dtype=np.int64)
    )
    assert found.inner.values.tolist() == [3.0, 1.0]
    assert found.inner is found.twice
    assert (found.inner.same, found.number) == (7.0, 2)


def test_what_is_the_same_for_all_becomes_an_array() -> None:
    assert broadcast_to_array(2.0, 3).tolist() == [2.0, 2.0, 2.0]


def test_rows_have_the_seconds_and_bytes_that_each_has_alone() -> None:
    request = small()
    rows = legal_meshes(request, 8, Legality(request.one_rank_run))
    formulas = VectorizedFormulas(request, rows)
    index = np.arange(0, len(rows), max(1, len(rows) // 7), dtype=np.int64)
    formulas.prepare(index)
    seconds = broadcast_to_array(formulas.seconds(index, recompute=0.0).total, len(index))
    held = broadcast_to_array(formulas.bytes(index, recompute=0.0).total, len(index))
    for place, row in enumerate(index):
        alone = VectorizedFormulas(request, rows)
        one = np.array([row], dtype=np.int64)
        alone.prepare(one)
        assert seconds[place] == pytest.approx(
            broadcast_to_array(alone.seconds(one, recompute=0.0).total, 1)[0], rel=1e-12
        )
        assert held[place] == pytest.approx(
            broadcast_to_array(alone.bytes(one, recompute=0.0).total, 1)[0], rel=1e-12
        )
