"""A freed pin, more devices and the host are told where nothing fits under pins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.units import binary_bytes
from echelon.planner.explain.fixes import cheapest_pin_fixes
from echelon.planner.search.no_plan import best_fitting_plan
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import search
from echelon.planner.search.smallest import smallest_that_fits
from tests.planner.requests import small


def _over(share: float, pins: list[str]) -> tuple[SearchRequest, RankedPlan]:
    """Return a request with so much of the memory that its best plan would need, and the plan."""
    request = replace(small(pins=pins), top=1)
    best = search(request).best
    assert best is not None
    device = replace(request.cluster.device, memory_bytes=int(share * best.estimate.bytes_held))
    return replace(request, cluster=replace(request.cluster, device=device)), best


def test_a_freed_pin_is_the_best_that_fits() -> None:
    pins = ["tp=1", "pp=1", "cp=1", "zero=0", "recompute=none", "microbatch=1"]
    request, _ = _over(0.8, pins)
    assert best_fitting_plan(request) is None, binary_bytes(request.memory_bytes)
    fixes = cheapest_pin_fixes(request)
    assert fixes
    freed = [fix for fix in fixes if "=" in fix.changes[0]]
    assert freed
    for fix in freed:
        names = [change.partition("=")[0] for change in fix.changes]
        values = request.pins
        for name in names:
            values = values.without(name)
        entrant = best_fitting_plan(replace(request, pins=values))
        assert entrant is not None
        assert entrant.value == pytest.approx(fix.estimate.step_s)
        assert fix.estimate.bytes_held <= request.memory_bytes
        assert fix.saved_bytes > 0


def test_more_devices_and_the_host_are_told_too() -> None:
    request = small(devices=4, pins=["tp=1", "zero=1"], memory_gb=4.0)
    while best_fitting_plan(request) is not None:
        memory = int(0.97 * request.memory_bytes)
        device = replace(request.cluster.device, memory_bytes=memory)
        request = replace(request, cluster=replace(request.cluster, device=device))
    fixes = cheapest_pin_fixes(request)
    said = {fix.changes: fix for fix in fixes}
    host = said[("optimizer state to the host",)]
    assert host.untimed
    assert host.choice.offload
    larger = [fix for fix in fixes if fix.devices > 4]
    assert len(larger) == 1
    assert larger[0].changes == (f"4 -> {larger[0].devices} devices",)
    assert larger[0].choice.zero == 1
    assert all(fix.estimate.bytes_held <= request.memory_bytes for fix in fixes)
    assert [fix.devices for fix in fixes] == sorted(fix.devices for fix in fixes)


def test_more_devices_under_pins_are_as_few_as_do() -> None:
    """Not the next doubling: llama2-7b without hosts takes six of these, and two were tried."""
    request = make_request("llama2-7b", cluster="2xrtx4090", pins=["offload=none"])
    fixes = {fix.changes: fix for fix in cheapest_pin_fixes(request)}
    found = smallest_that_fits(request)
    assert found is not None
    assert fixes[("2 -> 6 devices",)].devices == found.num_devices == 6
