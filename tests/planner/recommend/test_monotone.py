"""More devices of a kind are never slower: at their fastest, and as recommended."""

from __future__ import annotations

from itertools import islice
from math import inf

import pytest

from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.request import make_request
from tests.planner.recommend.monotone_walk import (
    MonotoneCase,
    broken,
    drawn_cases,
    planned_seconds,
)

QUICK = frozenset({"nano", "gpt2-xl", "llama2-7b", "llama3-8b"})
"""Models whose searches take part of a second."""


def _wrong(case: MonotoneCase) -> tuple[str, ...]:
    few, many = (planned_seconds(case.request(count)) for count in case.counts)
    return broken(few, many)


@pytest.mark.slow
def test_cases_are_drawn_alike_and_differ() -> None:
    first = list(islice(drawn_cases(0), 100))
    assert first == list(islice(drawn_cases(0), 100))
    assert len(set(first)) == 100
    assert all(few < many for few, many in (case.counts for case in first))


# By number: to draw cases takes seconds, which whoever only collects these tests need not wait for.
@pytest.fixture(scope="module")
def quick_cases() -> list[MonotoneCase]:
    drawn = (one for one in drawn_cases(1) if one.model in QUICK and one.counts[1] <= 64)
    return [*islice(drawn, 4)]


@pytest.fixture(scope="module")
def hundred_cases() -> list[MonotoneCase]:
    return [*islice(drawn_cases(0), 100)]


@pytest.mark.quick("1")
@pytest.mark.parametrize("number", range(4))
def test_more_devices_are_never_slower(quick_cases: list[MonotoneCase], number: int) -> None:
    assert _wrong(quick_cases[number]) == (), str(quick_cases[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_more_devices_are_never_slower_in_a_hundred_cases(
    hundred_cases: list[MonotoneCase], number: int
) -> None:
    assert _wrong(hundred_cases[number]) == (), str(hundred_cases[number])


def test_what_breaks_the_rule_is_named() -> None:
    case = MonotoneCase(
        model="nano", device="h100", counts=(1, 2), trainer="echelon", batch=8
    ).request(1)
    one = planned_seconds(case)
    assert one.sure
    assert one.fastest <= one.recommended < inf
    slower = type(one)(fastest=2 * one.fastest, recommended=2 * one.recommended, sure=False)
    assert broken(one, slower) == ("the fastest", "the recommended", "the surely fitting")
    assert broken(slower, one) == ()


@pytest.mark.slow
def test_fewer_devices_with_hosts_are_not_faster_than_more_without() -> None:
    """64 RTX 4090 leave optimizer state to hosts, 80 need not: then they may."""
    case = MonotoneCase(
        model="llama3-70b", device="rtx4090", counts=(64, 80), trainer="echelon", batch=512
    )
    assert _wrong(case) == ()


@pytest.mark.slow
def test_where_nothing_fits_on_all_devices_some_stay_idle() -> None:
    """Five devices cut no matrix of llama3-8b evenly, four do."""
    found = recommend(make_request("llama3-8b", cluster="5xrtx4090"))
    assert isinstance(found, Recommendation)
    assert found.first.ranked.candidate.devices == 4


@pytest.mark.slow
def test_one_short_sequence_is_work_for_one_device_of_however_many() -> None:
    settings = ["batch.global_sequences=1", "batch.sequence_length=7"]
    found = recommend(make_request("gpt2", cluster="512xh100", settings=settings))
    assert isinstance(found, Recommendation)
    assert found.first.ranked.candidate.devices == 1
