"""A fix really fits and is legal, is the cheapest of its kind, and single changes come first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.units import binary_bytes
from echelon.planner.explain.fixes import choice_of, fixes_of
from echelon.planner.explain.pin_fixes import cheapest_fix
from echelon.planner.ranked import Ranked, estimate_choice, settings_of
from echelon.planner.request import Request
from echelon.planner.search import search
from echelon.planner.unfit import any_plan
from tests.planner.requests import small


def _over(share: float, pins: list[str]) -> tuple[Request, Ranked]:
    """Return a request with so much of the memory that its best plan would need, and the plan."""
    request = replace(small(pins=pins), top=1)
    best = search(request).best
    assert best is not None
    device = replace(request.cluster.device, memory_bytes=int(share * best.estimate.bytes_held))
    return replace(request, cluster=replace(request.cluster, device=device)), best


def test_a_fix_of_a_plan_fits_and_is_legal() -> None:
    request, best = _over(0.97, ["tp=2", "pp=2", "zero=1", "recompute=none", "microbatch=2"])
    fixes = fixes_of(request, best.choice)
    assert fixes
    assert len(fixes[0].changes) == 1
    for fix in fixes:
        further = len(fix.changes) == 2 and fix.estimate.step_s < fixes[0].estimate.step_s
        assert len(fix.changes) == 1 or further
        on = request
        if fix.devices != best.choice.devices:
            continue
        again = estimate_choice(on, fix.choice)
        assert again.bytes_held <= request.memory_bytes
        before = estimate_choice(request, best.choice)
        assert fix.saved_bytes == pytest.approx(before.bytes_held - again.bytes_held)
        one = Ranked(choice=fix.choice, estimate=again, simulated=False)
        plan = request.job(settings_of(request, one)).plan
        settings = {**best.choice.settings(has_experts=False), **fix.settings}
        assert request.job(settings).plan.layout.mesh == plan.layout.mesh
        closed = estimate_choice(request, best.choice).step_s
        assert fix.lost_s.value == pytest.approx(again.step_s - closed)
        assert fix.lost_s.low <= fix.lost_s.value <= fix.lost_s.high
    single = [fix for fix in fixes if len(fix.changes) == 1]
    same = [fix for fix in single if fix.devices == best.choice.devices and not fix.untimed]
    assert [fix.estimate.step_s for fix in same] == sorted(fix.estimate.step_s for fix in same)


def test_changes_come_in_pairs_only_where_one_is_not_enough() -> None:
    request, best = _over(0.6, ["tp=1", "pp=2", "zero=0", "recompute=none", "microbatch=3"])
    fixes = fixes_of(request, best.choice)
    assert fixes
    count = len(fixes[0].changes)
    assert all(len(fix.changes) in (count, count + 1) for fix in fixes)
    assert all(fix.estimate.bytes_held <= request.memory_bytes for fix in fixes)
    topics = [[change.split()[0] for change in fix.changes] for fix in fixes]
    assert all(len(set(one)) == len(one) for one in topics)


def test_a_plan_that_fits_needs_nothing() -> None:
    request, best = _over(1.5, ["pp=2"])
    assert fixes_of(request, best.choice) == ()
    assert cheapest_fix(request) == ()


def test_a_freed_pin_is_the_best_that_fits() -> None:
    pins = ["tp=1", "pp=1", "cp=1", "zero=0", "recompute=none", "microbatch=1"]
    request, _ = _over(0.8, pins)
    assert any_plan(request) is None, binary_bytes(request.memory_bytes)
    fixes = cheapest_fix(request)
    assert fixes
    freed = [fix for fix in fixes if "=" in fix.changes[0]]
    assert freed
    for fix in freed:
        names = [change.partition("=")[0] for change in fix.changes]
        values = request.pins
        for name in names:
            values = values.without(name)
        entrant = any_plan(replace(request, pins=values))
        assert entrant is not None
        assert entrant.value == pytest.approx(fix.estimate.step_s)
        assert fix.estimate.bytes_held <= request.memory_bytes
        assert fix.saved_bytes > 0


def test_more_devices_and_the_host_are_told_too() -> None:
    request = small(pins=["tp=1", "zero=1"], memory_gb=4.0)
    while any_plan(request) is not None:
        memory = int(0.97 * request.memory_bytes)
        device = replace(request.cluster.device, memory_bytes=memory)
        request = replace(request, cluster=replace(request.cluster, device=device))
    fixes = cheapest_fix(request)
    said = {fix.changes: fix for fix in fixes}
    host = said[("optimizer state to the host",)]
    assert host.untimed
    assert host.choice.offload
    larger = [fix for fix in fixes if fix.devices > 8]
    assert len(larger) == 1
    assert larger[0].changes == (f"8 -> {larger[0].devices} devices",)
    assert larger[0].choice.zero == 1
    assert all(fix.estimate.bytes_held <= request.memory_bytes for fix in fixes)
    assert [fix.devices for fix in fixes] == sorted(fix.devices for fix in fixes)


def test_the_choices_of_a_plan_are_those_that_made_it() -> None:
    answer = search(small(memory_gb=4.0))
    assert answer.ranked
    for one in answer.ranked:
        assert one.plan is not None
        assert choice_of(one.plan) == replace(
            one.choice, recomputed_share=choice_of(one.plan).recomputed_share
        )
