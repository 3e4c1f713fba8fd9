"""What changes the answer really does: the same search, made in the changed world, agrees."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.planner.explain.sensitivity import sensitivity
from echelon.planner.explain.what_if import WhatIf
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import small


@lru_cache(maxsize=1)
def _answer() -> SearchResult:
    """Closed forms know what stages 0 and 1 hold to a percent, not the sums of stage 2."""
    return search(replace(small(memory_gb=4.0, pins=["zero=0,1"]), top=1))


def test_less_memory_changes_the_plan_to_what_a_search_finds() -> None:
    answer = _answer()
    assert answer.best is not None
    choice = answer.best.candidate
    tight = answer.request.with_memory(0.9 * answer.best.estimate.bytes_held)
    (change,) = sensitivity(answer, [WhatIf(name="memory", request=tight, current_plan=choice)])
    found = search(replace(tight, top=1)).best
    assert found is not None
    assert change.best is not None
    assert change.gain_same is None
    assert change.differences
    assert change.best.estimate.bytes_held <= tight.memory_bytes
    assert change.best.estimate.step_s == pytest.approx(found.estimate.step_s, rel=5e-3)
    assert change.gain == pytest.approx(
        answer.best.estimate.step_s / change.best.estimate.step_s - 1
    )


def test_slow_links_change_the_plan_to_what_a_search_finds() -> None:
    answer = _answer()
    assert answer.best is not None
    cluster = answer.request.cluster
    links = tuple(replace(link, bandwidth=link.bandwidth / 200) for link in cluster.links)
    slow = replace(answer.request, cluster=replace(cluster, links=links))
    question = WhatIf(name="links", request=slow, current_plan=answer.best.candidate)
    (change,) = sensitivity(answer, [question])
    found = search(replace(slow, top=1)).best
    assert found is not None
    assert change.best is not None
    assert change.gain_same is not None
    assert change.gain_same <= change.gain < 0
    assert change.best.estimate.step_s == pytest.approx(found.estimate.step_s, rel=5e-3)


def test_nothing_fits_is_said() -> None:
    answer = _answer()
    assert answer.best is not None
    none = answer.request.with_memory(1e6)
    question = WhatIf(name="none", request=none, current_plan=answer.best.candidate)
    (change,) = sensitivity(answer, [question])
    assert change.best is None
