"""Changes with which a search has a plan: each the best of its kind, with its price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.planner.explain.no_plan import leanest_plan
from echelon.planner.search.request import make_request
from echelon.planner.search.search import best_fitting_plan, search
from tests.planner.requests import small


def test_a_freed_pin_is_the_best_that_fits() -> None:
    pins = ["tp=1", "pp=1", "cp=1", "zero=0", "recompute=none", "microbatch=1"]
    room = search(replace(small(pins=pins), top=1)).first.estimate.bytes_held
    request = small(pins=pins).with_memory(0.8 * room)
    leanest = leanest_plan(search(request))
    assert leanest is not None
    freed = [fix for fix in leanest.fixes if fix.flags.startswith("--pin ")]
    assert freed
    for fix in freed:
        names = [change.partition("=")[0] for change in fix.changes]
        best = best_fitting_plan(request.without_pins(*names))
        assert best is not None
        assert best.candidate() == fix.choice
        assert fix.estimate.bytes_held <= request.memory_bytes
        assert fix.saved_bytes > 0
        ratio = fix.estimate.step_s / leanest.estimate.step_s
        assert fix.time_ratio == pytest.approx(ratio)


def test_more_devices_under_pins_are_as_few_as_do() -> None:
    """Not the next doubling: llama2-7b without hosts takes six of these, and two were tried."""
    request = make_request("llama2-7b", cluster="2xrtx4090", pins=["offload=none"])
    leanest = leanest_plan(search(request))
    assert leanest is not None
    fixes = {fix.changes: fix for fix in leanest.fixes}
    assert fixes[("2 -> 6 devices",)].devices == 6
    assert fixes[("2 -> 6 devices",)].flags == "--cluster 6xrtx4090"
