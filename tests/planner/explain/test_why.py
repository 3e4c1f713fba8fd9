"""What a step waits for adds up, and what binds a plan is what frees it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.planner.explain.why import COMPUTE_TERMS, explain_best
from echelon.planner.predict.bands import step_band, step_term_bands
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import small


@lru_cache(maxsize=1)
def _answer() -> SearchResult:
    return search(replace(small(memory_gb=4.0), top=1))


def test_why_adds_up() -> None:
    answer = _answer()
    told = explain_best(answer)
    assert answer.best is not None
    step = told.step.value
    every = step_term_bands(answer.best.estimate)
    assert sum(amount.value for amount in every.values()) == pytest.approx(step)
    assert told.work_s == pytest.approx(sum(every[name].value for name in COMPUTE_TERMS))
    assert sum(amount.value for amount in told.exposed.values()) == pytest.approx(
        step - told.work_s
    )
    assert told.mfu.low <= told.mfu.value <= told.mfu.high
    assert told.ideal_s < told.work_s < step
    low, high = (
        sum(getattr(amount, side) for amount in every.values()) for side in ("low", "high")
    )
    assert low <= step_band(answer.best.estimate).low * (1 + 1e-9)
    assert high >= step_band(answer.best.estimate).high * (1 - 1e-9)


def test_memory_binds_where_it_is_short_and_not_where_there_is_plenty() -> None:
    roomy = search(replace(small(memory_gb=80.0), top=1))
    assert not [one for one in explain_best(roomy).binding if one.kind == "memory"]
    tight = search(replace(small(memory_gb=2.0), top=1))
    assert tight.best is not None
    (bound,) = [one for one in explain_best(tight).binding if one.kind == "memory"]
    assert bound.gain is not None
    assert roomy.best is not None
    gain = tight.best.estimate.step_s / roomy.best.estimate.step_s - 1
    assert bound.gain == pytest.approx(gain, rel=0.05)
