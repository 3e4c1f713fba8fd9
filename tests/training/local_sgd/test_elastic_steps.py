"""Outer steps of one rank whose island meets others, or none: by hand, and what it tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.event import EventList
from echelon.launch.context import LostRank
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.recorder import Recorder
from echelon.training.local_sgd.checkpoint import ElasticIslandCheckpoint
from echelon.training.local_sgd.elastic_steps import ElasticOuterSteps
from echelon.training.local_sgd.outer_steps import PARAMETERS
from echelon.training.steps.part import StepPlace, StepResult
from tests.parallel.layouts import plan_of
from tests.proof.run.local_sgd import with_islands

CPU = torch.device("cpu")

OTHER_LOST = LostRank(rank=1, attempt=0, cause="killed", returns=False)


def alone(events: EventList) -> tuple[ElasticOuterSteps, list[Bucket]]:
    """Return the outer steps of the first of two islands, the other of which is lost at once."""
    plan = plan_of()
    groups = rank_groups(plan, Recorder(0, events))
    model = apply_plan(plan, groups, CPU)
    whole = with_islands(plan, every=2, min_islands=1, outer_learning_rate=0.5)
    outer = ElasticOuterSteps(
        StepPlace(run=whole, plan=plan, model=model, masters={}, groups=groups, device=CPU)
    )
    context: Any = SimpleNamespace(
        rank=0, attempt=0, store=HashStore(), progress=SimpleNamespace(lost=[OTHER_LOST])
    )
    outer.connect(context, 20.0, ends_after=8)
    outer.begin(0)
    return outer, model.buckets


def tell(outer: ElasticOuterSteps, step: int, loss: float) -> StepResult:
    """Tell the outer steps what this island's ranks agreed on after so many steps."""
    result = StepResult(
        step=step,
        loss=loss,
        tokens=10,
        grad_norm=1.0,
        learning_rate=0.1,
        loss_scale=1.0,
        skipped=False,
        rank_waits_s=(),
        rank_used_bytes=(),
        stop_requests=1,
        microbatch_losses={},
    )
    return outer.agreed(result, torch.zeros(1, 0))


def test_the_mean_is_over_the_islands_that_met() -> None:
    """B06: one of two moved by 4: half of all of it, and not of half."""
    events = EventList()
    outer, buckets = alone(events)
    first = {one.name: one.value_slice.clone() for one in buckets}
    for bucket in buckets:
        bucket.value_slice[: bucket.slots[-1].end] += 4.0
    assert tell(outer, 1, 2.0).stop_requests == 0
    assert outer.after_update(0, skipped=False) == []
    result = tell(outer, 2, 3.0)
    assert outer.after_update(1, skipped=False) == buckets

    for one in buckets:
        real = slice(0, one.slots[-1].end)
        torch.testing.assert_close(one.value_slice[real], first[one.name][real] + 2.0)
        assert torch.equal(outer.state()[PARAMETERS][one.name], one.value_slice)
    met = outer.met_after(2)
    assert met is not None
    assert (sorted(met.members), met.asks, outer.mean_loss(0.0, 1)) == ([0], 1, 3.0)
    assert outer.met_after(1) is None
    assert outer.speaks(2)
    assert (outer.end_step(result).stop_requests, outer.end_step(result).islands) == (1, (0,))
    assert outer.facts(result).tokens == 10
    names = [event.name for event in events.events if event.kind in ("meet", "lost")]
    assert names == ["islands 0 of 2 after step 2", "island 1 met after step 0"]
    told = "island 1 is lost: what it did after step 0 counts nowhere: killed"
    assert outer.news() == [told]
    assert outer.news() == []
    (absence,) = outer.end(2)
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
    outer.after_update(1, skipped=False)
    scope = outer.checkpoint
    assert isinstance(scope, ElasticIslandCheckpoint)
    told = scope.exchange(0)
    assert (told.index, told.size, scope.first_saving) == (0, 1, 0)
    assert told.gather_objects("all") == ["all"]
    assert scope.exchange(1).gather_objects("again") == ["again"]
