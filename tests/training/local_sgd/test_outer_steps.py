"""Outer steps of one rank whose other islands are as it says: by hand, and what is under way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Pending
from echelon.parallel.transport.recorder import Recorder
from echelon.training.local_sgd.outer_steps import GRADIENTS, MOMENTUM, PARAMETERS, OuterSteps
from echelon.training.steps.part import StepPlace
from tests.parallel.layouts import plan_of

CPU = torch.device("cpu")


def started(monkeypatch: pytest.MonkeyPatch, **local: Any) -> tuple[OuterSteps, list[Bucket]]:
    """Return outer steps of two islands, of which the other has not moved, and their buckets."""
    plan: Plan = plan_of()
    rounds = LocalSgd(**{"every": 2, "islands": 2, **local})
    groups = rank_groups(plan, Recorder(0, NoEvents()))
    model = apply_plan(plan, groups, CPU)
    # All-reduce of a group of one leaves a tensor alone: the others add zeros.
    monkeypatch.setattr(groups.islands, "all_reduce", lambda *_, **__: Pending())
    whole = replace(plan, mathematics=replace(plan.mathematics, local_sgd=rounds))
    place = StepPlace(run=whole, plan=plan, model=model, masters={}, groups=groups, device=CPU)
    return OuterSteps(place), model.buckets


def move(buckets: list[Bucket], by: float) -> None:
    for bucket in buckets:
        bucket.value_slice[: bucket.slots[-1].end] += by


def test_half_of_what_one_of_two_islands_moved_is_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, buckets = started(monkeypatch)
    first = {one.name: one.value_slice.clone() for one in buckets}
    move(buckets, 4.0)
    assert outer.after_update(0, skipped=False) == []
    assert outer.after_update(1, skipped=False) == buckets
    for one in buckets:
        real = slice(0, one.slots[-1].end)
        expected = first[one.name][real] + 2.0
        torch.testing.assert_close(one.value_slice[real], expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(outer.state()[PARAMETERS][one.name], one.value_slice)


def test_what_is_late_is_kept_and_half_of_it_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, buckets = started(monkeypatch, delay=1)
    assert set(outer.state()) == {PARAMETERS, GRADIENTS}
    first = buckets[0].value_slice.clone()
    move(buckets, 4.0)
    # What it touches is sent to the other slices afterwards, and only that where it is skipped.
    assert outer.after_update(1, skipped=True) == []
    assert buckets[0].name in outer.held_back(1)
    outer.settle()
    move(buckets, 1.0)
    assert outer.after_update(2, skipped=True) == buckets
    real = slice(0, buckets[0].slots[-1].end)
    # The outer parameters moved by 2, the island by 5: it goes on with half of each.
    expected = first[real] + 0.5 * 5.0 + 0.5 * 2.0
    torch.testing.assert_close(buckets[0].value_slice[real], expected, rtol=1e-14, atol=1e-14)


def test_momentum_is_held_where_the_outer_optimizer_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, _ = started(monkeypatch, outer="nesterov", outer_momentum=0.9)
    assert set(outer.state()) == {PARAMETERS, MOMENTUM}


def test_requests_to_stop_are_heard_at_the_end_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, _ = started(monkeypatch)
    assert [outer.stop_requests(step, 1) for step in range(4)] == [0, 1, 0, 1]
    assert outer.mean_loss(2.5, 4) == 2.5
