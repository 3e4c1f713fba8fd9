"""Counts of devices: which are walked, and the best of each."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from echelon.planner.recommend.device_counts import (
    best_count,
    even_counts,
    may_idle,
    on_fewer_that_fit,
    picked,
)
from echelon.planner.recommend.recommend import Recommendation, noise, recommend
from echelon.planner.search.ranked import objective_value
from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import SearchResult, search
from tests.planner.requests import small


def test_counts_are_of_one_node_or_of_whole_nodes() -> None:
    assert even_counts(small(devices=8).cluster) == (1, 2, 3, 4, 5, 6, 7, 8)
    counts = even_counts(small(devices=104).cluster)
    assert counts[7:] == (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96)


@pytest.mark.slow
def test_the_best_count_is_that_of_all_counts_planned_one_by_one() -> None:
    request = make_request("nano", cluster="8xh100")
    best = best_count(search(request), noise())
    answers = [
        search(replace(request, pins=request.pins.having("devices", count)))
        for count in even_counts(request.cluster)
    ]
    values = {
        one.first.candidate.devices: objective_value(request, one.first.estimate)
        for one in answers
        if one.best is not None
    }
    devices = best.answer.first.candidate.devices
    assert objective_value(request, best.answer.first.estimate) == min(values.values())
    assert values[devices] == min(values.values())
    fewer = min((value for count, value in values.items() if count < devices), default=inf)
    assert [one.worth for one in best.fewer] == [
        value
        for count, value in values.items()
        if count < devices and value < (1.0 + noise()) * values[8]
    ]
    assert fewer > values[devices]


def test_a_pinned_count_and_other_objectives_leave_nothing_idle() -> None:
    assert may_idle(small())
    assert may_idle(small(objective="expected"))
    assert not may_idle(small(objective="throughput"))
    pinned = small(pins=["devices=4"])
    assert not may_idle(pinned)
    assert best_count(search(pinned), noise()).fewer == ()


def test_plans_that_are_worth_too_little_are_not_picked() -> None:
    request = small()
    value = objective_value(request, search(request).first.estimate)
    assert picked(request, offload=False, below=0.5 * value, worlds=[8]) == []
    some = picked(request, offload=False, below=1.1 * value, worlds=[8])
    assert objective_value(request, some[0].estimate) == value


def test_where_nothing_fits_on_all_devices_the_most_that_do_answer() -> None:
    request = make_request("llama3-8b", cluster="5xrtx4090")
    assert search(request).best is None
    fewer = on_fewer_that_fit(search(request))
    assert fewer is not None
    assert fewer.first.candidate.devices == 4
    assert fewer.request == request
    assert on_fewer_that_fit(search(make_request("llama3-8b", cluster="3xrtx4090"))) is None


def test_where_rules_allow_no_plan_of_all_devices_far_fewer_do() -> None:
    """One short sequence is work for one device, of however many."""
    settings = ["batch.global_sequences=1", "batch.sequence_length=7"]
    request = make_request("gpt2", cluster="512xh100", settings=settings)
    nothing = search(request)
    assert nothing.num_legal == 0
    fewer = on_fewer_that_fit(nothing)
    assert fewer is not None
    assert fewer.first.candidate.devices == 144  # 12 blocks x 12 heads


def test_a_search_of_fewer_devices_that_was_stopped_stops_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = make_request("nano", cluster="8xh100")
    answer = search(request)

    def stopped(wanted: SearchRequest) -> SearchResult:
        return replace(search(wanted), interrupted=True)

    monkeypatch.setattr("echelon.planner.recommend.device_counts.search", stopped)
    with pytest.raises(KeyboardInterrupt):
        best_count(answer, noise())
    found = recommend(request)
    assert not isinstance(found, Recommendation)
    assert found.interrupted
    assert found.first.candidate == answer.first.candidate
