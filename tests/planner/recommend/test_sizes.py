"""Four sizes of a common device: the smallest that has a plan, then powers of two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.cluster import Cluster
from echelon.planner.recommend import sizes
from echelon.planner.recommend.sizes import four_sizes
from echelon.planner.search.request import SearchRequest, make_request


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
