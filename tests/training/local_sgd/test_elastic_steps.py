"""Outer steps of one rank whose island meets others, or none: by hand, and what it tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.event import EventList
from echelon.launch.context import LostRank
from echelon.parallel.apply import apply_plan
from echelon.parallel.buckets import Bucket
from echelon.parallel.transport.device_mesh import rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.training.local_sgd.elastic_steps import ElasticOuterSteps
from echelon.training.local_sgd.outer_steps import PARAMETERS
from tests.parallel.layouts import plan_of
from tests.proof.run.local_sgd import with_islands

OTHER_LOST = LostRank(rank=1, attempt=0, cause="killed", returns=False)


def alone(events: EventList) -> tuple[ElasticOuterSteps, list[Bucket]]:
    """Return the outer steps of the first of two islands, the other of which is lost at once."""
    plan = plan_of()
    groups = rank_groups(plan, Recorder(0, events))
    buckets = apply_plan(plan, groups, torch.device("cpu")).buckets
    whole = with_islands(plan, every=2, min_islands=1, outer_learning_rate=0.5)
    outer = ElasticOuterSteps(whole, buckets, {}, groups, torch.device("cpu"))
    context: Any = SimpleNamespace(
        rank=0, attempt=0, store=HashStore(), progress=SimpleNamespace(lost=[OTHER_LOST])
    )
    outer.connect(context, 20.0, ends_after=8)
    outer.meetings.begin(0)
    return outer, buckets


def test_the_mean_is_over_the_islands_that_met() -> None:
    """B06: one of two moved by 4: half of all of it, and not of half."""
    events = EventList()
    outer, buckets = alone(events)
    first = {one.name: one.value_slice.clone() for one in buckets}
    for bucket in buckets:
        bucket.value_slice[: bucket.slots[-1].end] += 4.0
    assert outer.stop_requests(0, 1) == 0
    assert outer.end_step(0, updated=True) == []
    outer.stop_requests(1, 1)
    outer.hear(3.0, 10)
    assert outer.end_step(1, updated=True) == buckets

    for one in buckets:
        real = slice(0, one.slots[-1].end)
        torch.testing.assert_close(one.value_slice[real], first[one.name][real] + 2.0)
        assert torch.equal(outer.state()[PARAMETERS][one.name], one.value_slice)
    met = outer.met_after(2)
    assert met is not None
    assert (sorted(met.members), met.asks, outer.mean_loss(0.0, 1)) == ([0], 1, 3.0)
    assert outer.met_after(1) is None
    assert outer.speaks_of(2)
    names = [event.name for event in events.events if event.kind in ("meet", "lost")]
    assert names == ["islands 0 of 2 after step 2", "island 1 met after step 0"]
    told = "island 1 is lost: what it did after step 0 counts nowhere: killed"
    assert outer.news() == [told]
    assert outer.news() == []
    (absence,) = outer.absences(2)
    assert (absence.island, absence.first_step, absence.last_step) == (1, 1, 2)


def test_an_island_that_was_given_outer_parameters_goes_on_from_them() -> None:
    outer, buckets = alone(EventList())
    for bucket in buckets:
        bucket.value_slice += 1.0
    outer.take_back()
    agreed = outer.state()[PARAMETERS]
    assert all(torch.equal(one.value_slice, agreed[one.name]) for one in buckets)


def test_a_checkpoint_is_written_by_those_that_met() -> None:
    outer, _ = alone(EventList())
    outer.end_step(1, updated=True)
    told = outer.exchange(0)
    assert (told.index, told.size, outer.saving) == (0, 1, [0])
    assert told.gather_objects("all") == ["all"]
    assert outer.exchange(1).gather_objects("again") == ["again"]
