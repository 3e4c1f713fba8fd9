"""The smallest cluster that has a plan: nothing smaller has one, and nothing is left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from echelon.planner.search.request import make_request
from echelon.planner.search.search import search
from echelon.planner.search.smallest import (
    anything_fits,
    clusters_of_devices,
    least_devices,
    planned,
    smallest_that_fits,
    without_host,
)
from tests.planner.search.smallest_walk import cases, compare


def test_there_are_forty_cases() -> None:
    assert len(cases()) == len(set(cases())) == 40


@pytest.mark.quick("('llama2-7b', 'rtx4090', 16)")
@pytest.mark.parametrize("case", cases()[4::17], ids=str)
def test_no_smaller_cluster_plans(case: tuple[str, str, int]) -> None:
    compared = compare(case)
    assert compared.found == compared.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=str)
def test_no_smaller_cluster_plans_in_any_of_forty_cases(case: tuple[str, str, int]) -> None:
    compared = compare(case)
    assert compared.found == compared.exhaustive


def test_clusters_are_parts_of_a_node_and_then_whole_nodes() -> None:
    names = [one.name for one in islice(clusters_of_devices("8xh100+hdr", 6), 5)]
    assert names == ["6xh100+hdr", "7xh100+hdr", "8xh100+hdr", "16xh100+hdr", "24xh100+hdr"]


@pytest.mark.parametrize("model", ["llama3-8b", "llama2-70b", "mixtral-8x7b"])
def test_nothing_fits_on_fewer_devices_than_the_weights_need(model: str) -> None:
    request = make_request(model, cluster="8xrtx4090")
    least = least_devices(request)
    assert least > 0
    for cluster in clusters_of_devices("1xrtx4090"):
        if cluster.num_devices >= least:
            break
        assert not anything_fits(make_request(model, cluster=cluster.name))


def test_fewer_devices_may_do_what_more_cannot() -> None:
    """Five pipeline ranks have the whole vocabulary on one of them, two times two have half."""
    requests = [make_request("llama3-8b", cluster=f"{count}xrtx4090") for count in (4, 5)]
    assert [search(replace(one, top=1)).best is not None for one in requests] == [True, False]
    found = smallest_that_fits(requests[1])
    assert found is not None
    assert (found.name, found.num_devices, found.offload) == ("4xrtx4090", 4, True)


def test_optimizer_state_stays_on_devices_where_that_is_asked_for() -> None:
    request = make_request("llama3-8b", cluster="1xa100-40gb")
    found = smallest_that_fits(without_host(request))
    assert found is not None
    assert (found.name, found.offload) == ("4xa100-40gb", False)
    assert smallest_that_fits(without_host(request), most=3) is None


def test_what_fits_only_just_is_left_out_where_room_is_asked_for() -> None:
    request = make_request("llama3-8b", cluster="1xh100")
    plan = planned(request)
    assert plan is not None
    assert plan.plan is not None
    assert plan.estimate.bytes_held <= request.memory_bytes
    assert planned(request, room=0.5) is None


def test_devices_that_are_never_enough_end_the_search() -> None:
    request = make_request("llama3-8b", cluster="8xcpu", pins=["cp=1", "tp=1", "pp=1"])
    assert smallest_that_fits(request) is None
