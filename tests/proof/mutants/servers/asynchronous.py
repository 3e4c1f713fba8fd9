"""Bugs of asynchronous servers and workers: what is applied, how often, from which version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from echelon.core.choices.updates import Updates
from echelon.core.plan import Plan
from echelon.parallel.servers import Reply, WorkerMessages
from echelon.parallel.storage.buckets import Bucket
from echelon.training.servers.asynchronous import AsynchronousServer, AsynchronousWorker
from echelon.training.servers.served import Push, Served
from tests.proof.layouts import layout
from tests.proof.mutants.planting import Told, mutant


def asynchronous(
    *, bound: int = 2, damping: float = 1.0, workers: int = 2, clip_norm: float | None = 1.0
) -> Plan:
    """Return a plan of two asynchronous servers."""
    mesh = {"dp_replicate": workers, "servers": 2}
    plan = layout(dp=workers, mesh=mesh, optimizer={"clip_norm": clip_norm})
    updates = Updates(kind="asynchronous", max_staleness=bound, damping=damping)
    return replace(plan, mathematics=replace(plan.mathematics, updates=updates))


def told(rule: str, factor: str, **chosen: Any) -> Told:
    """Return what is told of a bug, by its rule and its factor."""
    return Told(rule, "", factor, "servers", plan=chosen, of=asynchronous)


@mutant(told("prove-replayed-loss", "stale"))
def stale_version_as_fresh(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let workers compute from the pull before the last, and call it the last."""
    init, pull = AsynchronousWorker.__init__, WorkerMessages.pull

    def keeps_first(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.messages.pulled = [bucket.values.clone() for bucket in self.model.buckets]

    def late(self: Any, buckets: Sequence[Bucket]) -> list[Reply]:
        answers = pull(self, buckets)
        fresh = [bucket.values.clone() for bucket in buckets]
        for bucket, old in zip(buckets, self.pulled, strict=True):
            bucket.values.copy_(old)
        self.pulled = fresh
        return answers

    patch.setattr(AsynchronousWorker, "__init__", keeps_first)
    patch.setattr(WorkerMessages, "pull", late)


@mutant(told("prove-replayed-loss", "undamped", damping=2.0))
def stale_gradient_as_fresh(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Apply every gradient at the rate of a fresh one, whatever its staleness."""
    apply = AsynchronousServer._apply

    def fresh(self: Any, pushes: Sequence[Push], staleness: int) -> None:
        apply(self, pushes, 0)

    patch.setattr(AsynchronousServer, "_apply", fresh)


@mutant(told("prove-replayed-loss", "twice"))
def shard_updated_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the second server make every update twice, and count it once."""
    apply = AsynchronousServer._apply

    def twice(self: Any, pushes: Sequence[Push], staleness: int) -> None:
        apply(self, pushes, staleness)
        if self.groups.rank == plan.mesh.world_size - 1:
            apply(self, pushes, staleness)

    patch.setattr(AsynchronousServer, "_apply", twice)


@mutant(told("prove-applied-once", "none"))
def push_applied_again(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Apply a push once more, as if it had come twice, and write both down."""
    apply = Served._apply

    def again(self: Served, pushes: Sequence[Push]) -> None:
        apply(self, pushes)
        if pushes[0].step == 1:
            apply(self, pushes)

    patch.setattr(Served, "_apply", again)


@mutant(told("prove-replayed-loss", "replicas weighted", bound=0, damping=0.0, workers=4))
def unfair_averaging(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Average each push with the mean of those before it."""
    apply = AsynchronousServer._apply
    workers = plan.mesh.num_workers

    def unfair(self: Any, pushes: Sequence[Push], staleness: int) -> None:
        for place, push in enumerate(pushes):
            weight = workers * 0.5 ** (workers - max(place, 1))
            for gradient in push.gradients:
                gradient.mul_(weight)
        apply(self, pushes, staleness)

    patch.setattr(AsynchronousServer, "_apply", unfair)


@mutant(told("prove-replayed-loss", "1/W", damping=0.0, clip_norm=None))
def share_of_a_worker_as_the_mean(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Apply a worker's part of the gradient as if it were that of the whole batch."""
    apply = AsynchronousServer._apply
    workers = plan.mesh.num_workers

    def part(self: Any, pushes: Sequence[Push], staleness: int) -> None:
        smaller = [replace(one, norm_squared=one.norm_squared / workers**2) for one in pushes]
        for one in smaller:
            for gradient in one.gradients:
                gradient.div_(workers)
        apply(self, smaller, staleness)

    patch.setattr(AsynchronousServer, "_apply", part)


@mutant(told("prove-staleness-bound", "none", bound=1))
def bound_of_nobody(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Answer every push at once, while the first worker is slow."""
    step, take = AsynchronousWorker.step, Served.take

    def slow(self: Any, *args: Any, **named: Any) -> Any:
        if self.groups.rank == 0:
            time.sleep(0.5)
        return step(self, *args, **named)

    def at_once(self: Served, push: Push) -> Any:
        bound, self.updates = self.updates, replace(self.updates, max_staleness=1000)
        try:
            return take(self, push)
        finally:
            self.updates = bound

    patch.setattr(AsynchronousWorker, "step", slow)
    patch.setattr(Served, "take", at_once)
