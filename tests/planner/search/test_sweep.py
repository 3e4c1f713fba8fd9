"""A sweep finds what a search that leaves nothing out finds, whatever fits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echelon.core.rulebook.planner import PLAN_FITS_MEMORY
from echelon.planner.search.sweep import SearchSweep
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
