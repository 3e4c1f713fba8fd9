"""A search near a plan keeps to its neighbourhood, and to pins."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from echelon.planner.explain.repeat_search import RepeatSearch, pins_near_candidate
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import small


@lru_cache(maxsize=1)
def _answer() -> SearchResult:
    return search(replace(small(memory_gb=4.0), top=1))


def test_near_is_around_the_plan_and_keeps_pins() -> None:
    answer = _answer()
    assert answer.best is not None
    choice = answer.best.candidate
    pins = pins_near_candidate(answer.request.pins.having("pp", 2), choice)
    assert pins.values_of("pp") == (2,)
    assert choice.mesh.tp in (pins.values_of("tp") or ())
    large = RepeatSearch(replace(answer, num_legal=10**9), answer.request)
    found = large.search(among=[choice])
    assert found.near
    assert found.best is not None
    assert found.best.estimate.step_s <= 1.001 * answer.best.estimate.step_s
    assert found.seen < answer.num_legal
