"""Plans far from the best are looked at where a space is large."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from echelon.planner.explain.distant_plans import best_distant_plans, distant_plans
from echelon.planner.explain.repeat_search import RepeatSearch
from echelon.planner.explain.sensitivity import sensitivity
from echelon.planner.explain.what_if import WhatIf, what_if_requests
from echelon.planner.search.request import SearchRequest
from echelon.planner.search.search import search
from tests.planner.requests import small


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
