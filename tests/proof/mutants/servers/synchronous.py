"""Bugs of parameter servers and of their workers: sums, updates, and what is sent back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.servers import PulledParameters, PushedSums, SentParameters
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Pending
from echelon.training.optimizer import SliceOptimizer
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import Told, mutant

TWO: Changes = {"dp": 2, "mesh": {"dp_replicate": 2, "servers": 2}}
FOUR: Changes = {"dp": 4, "mesh": {"dp_replicate": 4, "servers": 2}}


@mutant(Told("prove-gradients", "head.weight", "replicas weighted", "dp", plan=FOUR))
def unfair_averaging(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Average each push with the mean so far: of W workers the last one weighs 1/2, not 1/W."""
    workers = plan.mesh.num_workers

    def unfair(
        self: PushedSums, bucket: Bucket, received: list[torch.Tensor], pending: Pending
    ) -> None:
        pending.wait()
        mean = received[0]
        for one in received[1:]:
            mean = (mean + one) / 2
        bucket.gradient_slice.copy_(workers * mean)

    patch.setattr(PushedSums, "_add_up", unfair)


@mutant(Told("prove-gradients", "head.weight", "1/dp", "dp", plan=TWO))
def mean_of_means_on_servers(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide by the workers, although losses are divided by the tokens of all of them."""
    add_up = PushedSums._add_up

    def divided(self: PushedSums, bucket: Bucket, *received: Any) -> None:
        add_up(self, bucket, *received)
        bucket.gradient_slice.div_(plan.mesh.num_workers)

    patch.setattr(PushedSums, "_add_up", divided)


@mutant(Told("prove-clipped-update", "embedding.weight", "twice", "servers", plan=TWO))
def shard_updated_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the second server run its update twice, as if a push had come twice."""
    init, update = SliceOptimizer.__init__, SliceOptimizer.update

    def knows_its_rank(self: Any, *args: Any, groups: RankGroups, **named: Any) -> None:
        init(self, *args, groups=groups, **named)
        self.rank = groups.rank

    def twice(self: Any, learning_rate: float, factor: float, updated: Any) -> None:
        if self.rank == plan.mesh.world_size - 1:
            before = [one.gradient_slice.clone() for one in self._buckets]
            update(self, learning_rate, factor, lambda _: None)
            for bucket, gradient in zip(self._buckets, before, strict=True):
                bucket.gradient_slice.copy_(gradient)
        update(self, learning_rate, factor, updated)

    patch.setattr(SliceOptimizer, "__init__", knows_its_rank)
    patch.setattr(SliceOptimizer, "update", twice)


@mutant(Told("prove-clipped-update", "embedding.weight", "stale", "servers", plan=TWO))
def stale_version_as_fresh(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Send what a server had before the update, as the version after it."""
    updated = SentParameters.updated

    def before(self: Any, bucket: Bucket) -> None:
        fresh = bucket.value_slice.clone()
        old = self.__dict__.setdefault("sent_before", {}).get(bucket.name, fresh)
        self.sent_before[bucket.name] = fresh
        bucket.value_slice.copy_(old)
        updated(self, bucket)
        self.settle()
        bucket.value_slice.copy_(fresh)

    patch.setattr(SentParameters, "updated", before)


@mutant(
    Told("prove-clipped-update", "layers.1.attention_norm.weight", "stale", "servers", plan=TWO)
)
def worker_keeps_a_range(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let workers throw away what the second server sends of the largest bucket."""
    end_update = PulledParameters.end_update

    def keeps(self: Any) -> None:
        largest = max(self._all, key=lambda one: one.plan.num_elements)
        part = self._ranges[largest.index][1]
        before = largest.values[part.start : part.stop].clone()
        end_update(self)
        if self.__dict__.setdefault("pulled_once", False):
            largest.values[part.start : part.stop].copy_(before)
        self.pulled_once = True

    patch.setattr(PulledParameters, "end_update", keeps)
