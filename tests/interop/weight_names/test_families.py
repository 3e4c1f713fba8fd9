"""Rows of heads in files: every row once, whatever turns and however heads are grouped."""

from __future__ import annotations

import pytest

from echelon.interop.weight_names.source import HeadRows


def rows_of(order: HeadRows, count: int) -> list[int]:
    return [r.there + i * r.step for r in order.runs(0, count) for i in range(r.count)]


@pytest.mark.parametrize("turned", [0, 2, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_row_of_a_head_is_taken_once(turned: int, interleaved: bool) -> None:
    order = HeadRows(width=8, turned=turned, interleaved=interleaved and turned > 0)
    rows = rows_of(order, 24)
    assert sorted(rows) == list(range(24))
    for first in range(24):
        runs = list(order.runs(first, 24 - first))
        assert [r.there + i * r.step for r in runs for i in range(r.count)] == rows[first:]


def test_halves_of_a_part_become_halves_of_the_head() -> None:
    assert rows_of(HeadRows(width=8, turned=4), 8) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert rows_of(HeadRows(width=8, turned=4, interleaved=True), 8) == [0, 2, 4, 5, 1, 3, 6, 7]


def test_queries_keys_and_values_of_a_key_head_are_together() -> None:
    """Two queries to a key head: q q k v, q q k v."""
    q = HeadRows(width=2, heads=2, group_rows=8)
    k, v = (HeadRows(width=2, group_rows=8, start=start) for start in (4, 6))
    assert rows_of(q, 8) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert rows_of(k, 4) == [4, 5, 12, 13]
    assert rows_of(v, 4) == [6, 7, 14, 15]
