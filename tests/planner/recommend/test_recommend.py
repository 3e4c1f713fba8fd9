"""Decisions: simple before the last percent, sure before tight, idle before slow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from echelon.core.cluster import Cluster
from echelon.planner.predict.bands import fit_probability
from echelon.planner.recommend import recommend as sizes
from echelon.planner.recommend.recommend import (
    SURE,
    Recommendation,
    four_sizes,
    recommend,
)
from echelon.planner.search.candidate import complexity, splitting_axes
from echelon.planner.search.request import SearchAim, SearchRequest, make_request
from echelon.planner.search.search import SearchResult
from tests.planner.requests import small


def found(request: SearchRequest) -> Recommendation:
    result = recommend(request)
    assert isinstance(result, Recommendation)
    return result


def of(model: str, cluster: str, trainer: str = "echelon") -> Recommendation:
    return found(make_request(model, cluster=cluster, aim=SearchAim(trainer=trainer)))


def test_eight_billion_on_a_node_needs_no_context_ranks() -> None:
    """Nothing is made again, so it is the fastest, too: it fills a device, and surely fits."""
    one = of("llama3-8b", "8xh100")
    choice = one.first.ranked.candidate
    assert splitting_axes(choice) == ()
    assert choice.zero >= 2
    assert one.answer.first is one.first.ranked
    assert not choice.recompute
    assert choice.operators == ()
    assert SURE <= one.first.fits < 1.0
    assert one.faster_share == 0.0
    assert all(
        other.ranked.estimate.step_s > one.first.ranked.estimate.step_s for other in one.others
    )


def test_of_equally_simple_plans_the_surer_is_recommended() -> None:
    """Two sequences at a time are 0.3 % faster, and take 147 of 150 GB."""
    one = of("llama3-8b", "1xh200")
    choice = one.first.ranked.candidate
    assert (choice.microbatch, choice.offload, choice.recompute, choice.operators) == (
        1,
        True,
        0,
        (),
    )
    assert one.first.fits > 0.999
    (fastest,) = [other for other in one.others if "fastest" in other.preferred_for]
    assert fastest.ranked.candidate.microbatch == 2
    assert SURE < fastest.fits < 0.99
    assert 0.0 < one.faster_share < 0.01


@pytest.mark.quick("6.0")
@pytest.mark.parametrize("memory", [80.0, 6.0, 4.0])
def test_what_is_recommended_surely_fits(memory: float) -> None:
    request = small(memory_gb=memory)
    one = found(request)
    estimate = one.first.ranked.estimate
    assert one.sure
    assert one.first.fits == fit_probability(estimate, request.memory_bytes) >= SURE
    assert one.first.ranked.plan is not None


@pytest.mark.slow
def test_where_no_plan_surely_fits_the_page_says_so() -> None:
    """Memory between what is expected of the leanest plan and what it surely takes."""
    roomy = small()
    answer = recommend(replace(roomy, cluster=roomy.cluster).with_memory(1e6))
    assert isinstance(answer, SearchResult)
    assert answer.best is None
    low, high = answer.least_bytes, 4.0 * answer.least_bytes
    result: Recommendation | SearchResult = answer
    for _ in range(40):
        middle = (low + high) / 2.0
        result = recommend(roomy.with_memory(middle))
        if isinstance(result, SearchResult):
            low = middle
        elif result.sure:
            high = middle
        else:
            break
    assert isinstance(result, Recommendation)
    assert not result.sure
    assert result.first.fits < SURE


def test_simplest_of_what_is_within_the_noise() -> None:
    one = found(small(devices=16))
    first = one.first.ranked
    limit = first.estimate.step_s * (1.0 + one.faster_share)
    near = [plan for plan in one.answer.ranked if plan.estimate.step_s <= limit]
    assert complexity(first.candidate) == min(complexity(plan.candidate) for plan in near)


@pytest.mark.slow
def test_more_devices_are_never_slower() -> None:
    steps = [
        found(small(devices=count)).first.ranked.estimate.step_s for count in (1, 2, 4, 7, 8, 16)
    ]
    assert all(later <= earlier for earlier, later in pairwise(steps))


def test_a_tiny_model_leaves_devices_idle() -> None:
    one = of("nano", "8xh100")
    assert one.first.ranked.candidate.devices < 8


def test_pins_stay_and_pinned_devices_are_all_used() -> None:
    one = found(small(pins=["cp=2", "tp=2"]))
    mesh = one.first.ranked.candidate.mesh
    assert (mesh.cp, mesh.tp) == (2, 2)
    assert found(small(pins=["devices=4"])).first.ranked.candidate.devices == 4


def test_a_recommendation_that_is_interrupted_has_the_plans_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> Recommendation:
        raise KeyboardInterrupt

    monkeypatch.setattr("echelon.planner.recommend.recommend.recommend_from", interrupted)
    answer = recommend(small())
    assert isinstance(answer, SearchResult)
    assert answer.interrupted
    assert answer.best is not None


def request_on(cluster: str) -> SearchRequest:
    """Return the request of a small model on a cluster."""
    small = ("model.layers=2", "batch.global_sequences=32")
    return make_request("llama3-8b", cluster=cluster, settings=small, pins=["cp=1"])


def test_sizes_begin_with_the_smallest_and_double() -> None:
    found = four_sizes(request_on)
    clusters: list[Cluster] = [one.answer.request.cluster for one in found]
    assert [one.num_devices for one in clusters] == [1, 2, 4, 8]
    assert {one.device.name for one in clusters} == {"H100 SXM 80 GB"}
    assert all(one.first.fits > 0.9 for one in found)
    alone = four_sizes(request_on, alone=True)
    assert [one.first for one in alone] == [one.first for one in found]
    assert not any(one.others for one in alone)
    assert any(one.others for one in found)


@pytest.mark.slow
def test_a_size_without_a_plan_is_left_out_and_an_interruption_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [*four_sizes(request_on)]
    empty = replace(answers[0].answer, ranked=(), interrupted=False)
    monkeypatch.setattr(sizes, "recommend", lambda _, *, alone: empty)
    assert four_sizes(request_on) == []
    stopped = replace(empty, interrupted=True)
    monkeypatch.setattr(sizes, "recommend", lambda _, *, alone: stopped)
    with pytest.raises(KeyboardInterrupt):
        four_sizes(request_on)
    monkeypatch.setattr(sizes, "recommend", lambda _, *, alone: answers[0])
    assert len(four_sizes(request_on)) == 4
    monkeypatch.setattr(sizes, "smallest_that_fits", lambda _: None)
    assert four_sizes(request_on) == []
