"""What changes the answer really does: the same search, made in the changed world, agrees."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.planner.explain.repeat_search import RepeatSearch
from echelon.planner.explain.sensitivity import (
    WhatIf,
    best_distant_plans,
    distant_plans,
    sensitivity,
    what_if_requests,
    with_batch,
)
from echelon.planner.search.request import SearchRequest
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


@pytest.mark.slow
def test_a_large_space_is_searched_far_from_the_plan_too() -> None:
    """On a slow network a pipeline wins; on a fast one data ranks alone may."""
    slow = _linked(small(memory_gb=40.0, pins=["cp=1", "microbatch=1,2"]), 0.1)
    answer = search(replace(slow, top=1))
    assert answer.best is not None
    large = replace(answer, num_legal=10**9)
    now = RepeatSearch(large, slow)
    pool = distant_plans(large, now)
    assert len({choice.mesh.pp for choice, _ in pool}) > 1
    assert all(ratio == 1.0 for choice, ratio in pool if choice.mesh.pp == 1)
    assert answer.best.candidate in [choice for choice, _ in pool]
    for times in (1.0, 10.0):
        quick = _linked(slow, times)
        question = WhatIf(name="links", request=quick, current_plan=answer.best.candidate)
        (change,) = sensitivity(large, [question])
        found = search(replace(quick, top=1)).best
        assert found is not None
        assert change.best is not None
        assert change.near
        assert change.best.estimate.step_s == pytest.approx(found.estimate.step_s, rel=5e-3)


def test_plans_of_a_pool_follow_batch_and_devices() -> None:
    request = replace(small(memory_gb=4.0, pins=["cp=1", "tp=1,2", "pp=1,2"]), top=1)
    answer = replace(search(request), num_legal=10**9)
    assert answer.best is not None
    pool = distant_plans(answer, RepeatSearch(answer, answer.request))
    for question in what_if_requests(answer.request, answer.best.candidate):
        if not question.name.startswith(("global batch", "devices")):
            continue
        again = RepeatSearch(answer, question.request)
        found = [*best_distant_plans(pool, answer, again, question, math.inf)]
        assert found
        total = question.request.mathematics.global_sequences
        for one in found:
            choice = one.candidate
            assert choice.devices == question.request.cluster.num_devices
            assert total == choice.mesh.dp * choice.microbatch * choice.microbatches
            assert not again.problems(choice)
        assert not [*best_distant_plans(pool, answer, again, question, 0.0)]


def _linked(request: SearchRequest, times: float) -> SearchRequest:
    """Return the request with links so many times as fast."""
    cluster = request.cluster
    links = tuple(replace(link, bandwidth=times * link.bandwidth) for link in cluster.links)
    return replace(request, cluster=replace(cluster, links=links))


def test_every_question_is_another_world() -> None:
    answer = search(replace(small(devices=16, memory_gb=4.0), top=1))
    assert answer.best is not None
    asked = [*what_if_requests(answer.request, answer.best.candidate)]
    names = [question.name for question in asked]
    assert len(set(names)) == len(names)
    for word in ("memory", "inter-node", "intra-node", "latency", "peak", "global batch"):
        assert any(name.startswith(word) for name in names)
    for question in asked:
        changed = question.request
        assert (changed.cluster, changed.mathematics) != (
            answer.request.cluster,
            answer.request.mathematics,
        )
        assert question.current_plan.devices in (16, 32)
    more = next(question for question in asked if question.name.startswith("devices"))
    assert more.request.cluster.num_devices == 32


def test_a_plan_with_another_batch_is_legal() -> None:
    request = with_batch(small(memory_gb=4.0), 48)
    best = search(replace(request, top=1)).best
    assert best is not None
    assert best.plan is not None
    assert best.plan.mathematics.global_sequences == 48
