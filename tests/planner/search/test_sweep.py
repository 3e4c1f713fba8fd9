"""A sweep finds what a search that leaves nothing out finds, whatever fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from echelon.core.rulebook.planner import PLAN_FITS_MEMORY
from echelon.cost.inputs.numbers import Array
from echelon.planner.search.formulas import RowIndex
from echelon.planner.search.sweep import SearchSweep, WorldTable, world_table
from tests.planner.requests import MIXTURE, SMALL, exhaustive, small


@pytest.mark.one_in(5)
@pytest.mark.system("S48")
@pytest.mark.parametrize(
    ("devices", "memory_gb", "settings"),
    [
        (8, 80.0, SMALL),
        (8, 4.0, SMALL),
        (8, 3.0, SMALL),
        (6, 3.5, SMALL),
        (8, 4.5, MIXTURE),
        # Two nodes: ZeRO 3 may keep slices in each of them.
        (16, 1.2, SMALL),
        pytest.param(16, 80.0, SMALL, marks=pytest.mark.slow),
        pytest.param(16, 1.6, MIXTURE, marks=pytest.mark.slow),
    ],
)
def test_a_sweep_finds_the_best_of_all_plans(
    devices: int, memory_gb: float, settings: Sequence[str]
) -> None:
    request = small(devices=devices, memory_gb=memory_gb, settings=settings)
    everything = exhaustive(request, devices)
    keep = min(20, len(everything.best))
    sweep = SearchSweep(request, keep=keep)
    sweep.walk(devices)
    found = [entrant.value for entrant in sweep.best.ranked()]
    # gpipe is as fast as 1f1b, breadth-first as interleaved: one of both stands for both.
    same = {"gpipe": "1f1b", "breadth-first": "interleaved-1f1b"}
    wanted = sorted(
        value
        for (layout, name, more), value in everything.best.items()
        if (layout, same.get(name, ""), more) not in everything.best
    )[:keep]
    assert found[: len(wanted)] == pytest.approx(wanted, rel=1e-12)
    assert found[:1] == pytest.approx(everything.values(1), rel=1e-12)


def test_every_plan_is_counted_and_those_that_hold_too_much() -> None:
    request = small(memory_gb=3.0)
    everything = exhaustive(request, 8)
    sweep = SearchSweep(request, keep=10**6)
    sweep.walk(8)
    dropped = {"gpipe", "breadth-first"}
    assert sweep.counts.seen <= everything.num_plans
    fitting = sum(1 for (_, name, _) in everything.best if name not in dropped)
    gpipe = sum(entrant.schedule_option.name == "gpipe" for entrant in sweep.best.ranked())
    assert len(sweep.best.found) == fitting + gpipe
    refused = sweep.counts.refused[PLAN_FITS_MEMORY.id]
    assert 0 < refused < sweep.counts.seen


def test_nothing_is_found_where_nothing_fits_and_the_least_is_known() -> None:
    request = small(memory_gb=0.51)
    sweep = SearchSweep(request)
    sweep.walk(8)
    assert sweep.best.ranked() == []
    assert sweep.least_bytes > request.memory_bytes
    assert sweep.counts.refused[PLAN_FITS_MEMORY.id] == sweep.counts.seen


def test_values_of_more_devices_weigh_more_where_each_costs() -> None:
    request = small(objective="throughput")
    sweep = SearchSweep(request)
    sweep.walk(4)
    best = sweep.best.ranked()[0]
    alone = SearchSweep(small())
    alone.walk(4)
    assert best.value == pytest.approx(4 * alone.best.ranked()[0].value)


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
