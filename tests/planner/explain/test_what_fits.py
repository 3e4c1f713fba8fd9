"""Changes with which a search has a plan: each the best of its kind, with its price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.planner.explain.no_plan import leanest_plan
from echelon.planner.search.pins import read_pins
from echelon.planner.search.request import make_request
from echelon.planner.search.search import search
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
        plans = search(request.without_pins(*names)).ranked
        assert fix.choice in [one.candidate for one in plans]
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


def test_the_line_of_a_whole_plan_is_freed_word_by_word() -> None:
    whole = small(pins=("pp2 dp4, ZeRO 0, 1f1b, microbatches of 3",))
    request = whole.with_memory(0.98 * search(whole).first.estimate.bytes_held)
    leanest = leanest_plan(search(request))
    assert leanest is not None
    freed = [fix for fix in leanest.fixes if fix.flags.startswith("--pin ")]
    assert freed
    for fix in freed:
        assert all(before != after for before, after in map(_values, fix.changes)), fix.changes
        typed = [text.strip() for text in fix.flags.split("--pin ") if text]
        free = request.without_pins(*(text.partition("=")[0] for text in typed))
        values = {**free.pins.values, **read_pins(typed).values}
        assert search(replace(free, pins=replace(free.pins, values=values))).best, fix.flags
    assert request.pins.text("recompute") == "recompute=none"
    assert request.pins.typed["recompute"] == "--pin pp2 dp4, ZeRO 0, 1f1b, microbatches of 3"


def _values(change: str) -> tuple[str, str]:
    """Return the values of a pin before and after a change."""
    pin, _, after = change.partition(" -> ")
    return pin.partition("=")[2], after
