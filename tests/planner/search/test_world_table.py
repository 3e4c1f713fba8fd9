"""What searches of one run share: the same rows for all that cannot change them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echelon.cost.inputs.numbers import Array
from echelon.planner.predict.formulas import RowIndex
from echelon.planner.search.sweep import SearchSweep
from echelon.planner.search.world_table import WorldTable, world_table
from tests.planner.requests import MIXTURE, small


def test_memory_and_pins_of_orders_change_no_table() -> None:
    request = small()
    known = world_table(request, 8)
    others = (
        request.with_memory(1e9),
        replace(request, objective="throughput", uncounted_factor=1.5),
        replace(request, pins=request.pins.having("offload", 1)),
        replace(request, pins=request.pins.having("zero", 2)),
    )
    assert all(world_table(other, 8) is known for other in others)
    # How many nodes a network joins changes nothing for ranks of two of them.
    assert world_table(small(devices=16), 16) is world_table(small(devices=32), 16)


def test_what_changes_rows_or_seconds_has_a_table_of_its_own() -> None:
    request = small()
    known = world_table(request, 8)
    assert world_table(request, 4) is not known
    cut = world_table(replace(request, pins=request.pins.having("tp", 2)), 8)
    assert {*cut.rows.columns["tp"].tolist()} == {2} < {*known.rows.columns["tp"].tolist()}
    assert world_table(small(settings=MIXTURE), 8) is not known


def test_seconds_of_a_row_are_computed_once() -> None:
    table = fresh(8)
    asked: list[list[int]] = []

    def compute(new: RowIndex) -> Array:
        asked.append(new.tolist())
        return new.astype(np.float64)

    assert table.steady(np.array([1, 3]), compute).tolist() == [1.0, 3.0]
    assert table.steady(np.array([3, 2]), compute).tolist() == [3.0, 2.0]
    assert asked == [[1, 3], [2]]


def test_bytes_are_kept_where_all_rows_were_asked_for() -> None:
    table, asked = fresh(8), list[int]()
    every = np.arange(len(table.rows), dtype=np.int64)

    def compute(new: RowIndex) -> list[tuple[Array, Array]]:
        asked.append(len(new))
        return [(new.astype(np.float64), new.astype(np.float64))]

    few = np.array([4, 2])
    for _ in range(2):
        assert [part.tolist() for part in table.held("a", 1, few, compute)[0]] == [[4, 2], [4, 2]]
    table.held("a", 1, every, compute)
    assert [part.tolist() for part in table.held("a", 1, few, compute)[0]] == [[4, 2], [4, 2]]
    assert asked == [2, 2, len(every)]


def test_a_second_search_finds_what_a_first_one_did() -> None:
    """Whatever is known of rows by then."""
    found: list[list[float]] = []
    for memory in (80.0, 3.0, 80.0):
        request = small(memory_gb=memory, settings=MIXTURE)
        sweep = SearchSweep(request)
        sweep.walk(8)
        found.append([one.value for one in sweep.best.ranked()])
    assert found[0] == found[2]


def fresh(world: int) -> WorldTable:
    known = world_table(small(), world)
    return WorldTable(known.rows, known.formulas)
