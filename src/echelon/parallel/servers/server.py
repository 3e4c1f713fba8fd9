# SPDX-License-Identifier: Apache-2.0
"""A parameter server: its range of every bucket, with the optimizer state of that range alone.

What workers push is added in the order of workers, so a run gives the same bits every time. The sum
is the gradient of the mean loss of the global batch: losses are divided by its tokens before
backward, and nothing here divides by a number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import BucketPlan
from echelon.layout.slots import plan_server_ranges, served_buckets, server_of_rank, slot_ranges
from echelon.layout.stage import decays, held_parameters, part_of
from echelon.models.piece_sizes import PieceSizes
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.data import MAX_IN_FLIGHT, GradientReduction
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.pipeline import PipelineExecutor, StreamShape
from echelon.parallel.rank_model import RankModel
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.storage.weights import fill_initial
from echelon.parallel.tensor_memory import OwnedTensorMemory
from echelon.parallel.transport.collectives import Pending
from echelon.parallel.zero import ParameterGathering

Received = Sequence[torch.Tensor]
"""What every worker has sent of a bucket, in the order of workers."""


class PushedSums(GradientReduction):
    """Receive the gradients of all workers for the ranges of one server, and add them up."""

    def __init__(self, plan: Plan, groups: RankGroups, buckets: Sequence[Bucket]) -> None:
        """Start with nothing under way."""
        super().__init__(plan, groups)
        self._servers, self._buckets = groups.servers, buckets
        self._workers = range(plan.mesh.num_workers)

    def finish(self) -> None:
        """Return when the gradients of this server are the sums over all workers."""
        arriving: deque[tuple[Bucket, Received, Pending]] = deque()
        for bucket in self._buckets:
            arriving.append((bucket, *self._receive(bucket)))
            if len(arriving) > MAX_IN_FLIGHT:
                self._add_up(*arriving.popleft())
        for one in arriving:
            self._add_up(*one)

    def _receive(self, bucket: Bucket) -> tuple[Received, Pending]:
        received = [
            torch.empty_like(bucket.gradient_slice, dtype=self._dtype) for _ in self._workers
        ]
        receives = dict(zip(self._workers, received, strict=True)) if received[0].numel() else {}
        name = f"gradients.{bucket.name}"
        return received, self._servers.exchange({}, receives, name=name)

    def _add_up(self, bucket: Bucket, received: Received, pending: Pending) -> None:
        pending.wait()
        total, *others = received
        for one in others:
            total.add_(one)
        bucket.gradient_slice.copy_(total)


class SentParameters(ParameterGathering):
    """Send the ranges of a server to all workers as soon as they have their new values."""

    def __init__(self, plan: Plan, groups: RankGroups, buckets: Sequence[Bucket]) -> None:
        """Start with nothing under way."""
        shards = groups.shard, groups.expert_shard
        super().__init__(buckets, (), shards, plan.layout.zero)
        self._servers, self._workers = groups.servers, range(plan.mesh.num_workers)
        self._sent: list[Pending] = []

    def updated(self, bucket: Bucket) -> None:
        """Send the range of a bucket."""
        values = bucket.value_slice
        sends = dict.fromkeys(self._workers, values) if values.numel() else {}
        self._sent.append(self._servers.exchange(sends, {}, name=f"parameters.{bucket.name}"))

    def end_update(self) -> None:
        """Return when all that was sent has left."""
        self.settle()

    def settle(self) -> None:
        """Return when nothing is under way."""
        for pending in self._sent:
            pending.wait()
        self._sent.clear()


def server_model(
    plan: Plan,
    groups: RankGroups,
    device: torch.device,
    *,
    pieces: PieceSizes,
    initial: bool = True,
) -> RankModel:
    """Build what a server has of a plan's model: ranges of buckets, and no part that computes.

    It has `initial` weights, or zeros.
    """
    buckets = server_buckets(plan, server_of_rank(plan, groups.rank), device)
    if initial:
        fill_initial(buckets, [one.value_slice for one in buckets], plan, groups, device)
    reduction = PushedSums(plan, groups, buckets)
    store = GradientStore(reduction, pieces)
    like = torch.empty(0, dtype=TORCH_DTYPES[plan.mathematics.precision.parameters], device=device)
    return RankModel(
        stages={},
        buckets=buckets,
        store=store,
        reduction=reduction,
        gathering=SentParameters(plan, groups, buckets),
        parameter_store=None,
        executor=PipelineExecutor(
            {},
            pp_rank=0,
            groups=groups,
            store=store,
            stream=StreamShape.from_plan(plan, like, scattered=False),
        ),
    )


def server_buckets(plan: Plan, server: int, device: torch.device) -> list[Bucket]:
    """Return the buckets of a server: of each its range of values and gradients, in zeros.

    The whole has no memory here.
    """
    specs = {spec.name: spec for spec in held_parameters(plan, part_of(plan, 0))}
    return [
        _server_bucket(plan, bucket, ranges[server], specs, device)
        for bucket, ranges in zip(served_buckets(plan), plan_server_ranges(plan), strict=True)
    ]


def _server_bucket(
    plan: Plan,
    bucket_plan: BucketPlan,
    own: range,
    specs: dict[str, ParameterSpec],
    device: torch.device,
) -> Bucket:
    precision = plan.mathematics.precision
    # One element in the shape of all: the whole has no memory here.
    values, gradients = (
        torch.empty(1, dtype=TORCH_DTYPES[dtype], device="meta").expand(bucket_plan.num_elements)
        for dtype in (precision.parameters, precision.gradients)
    )
    bucket = Bucket(
        plan=bucket_plan,
        values=values,
        gradients=gradients,
        values_memory=OwnedTensorMemory(torch.empty(0)),
        gradients_memory=OwnedTensorMemory(torch.empty(0)),
        own=slice(own.start, own.stop),
        value_slice=torch.zeros(len(own), dtype=values.dtype, device=device),
        gradient_slice=torch.zeros(len(own), dtype=gradients.dtype, device=device),
    )
    for slot in slot_ranges(plan, bucket_plan, specs):
        place = slice(slot.start, slot.stop)
        bucket.slots.append(
            Slot(
                spec=slot.spec,
                parameter=nn.Parameter(values[place].view(slot.spec.shape)),
                bucket=bucket,
                start=slot.start,
                gradient=gradients[place].view(slot.spec.shape),
                uses=1,
                counted=True,
            )
        )
        if decays(plan.mathematics.optimizer, slot.spec):
            bucket.decay_end = slot.stop
    return bucket
