# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: ranks read other samples; gradients are summed, bucket by bucket.

Split: the samples of the global batch; at ZeRO stages 1 to 3 the sums, too: a slice per rank.
Sent:  stage 0: one all-reduce per bucket and step; stages 1 to 3: one reduce-scatter per bucket,
       after every microbatch or once per step (`zero.accumulate`), and under hybrid sharding one
       all-reduce of the slice over the replicas; with `zero.reduce`, codes in two hops in place of
       the reduce-scatter (`transport/quantised_sums.py`), of which the second begins when the next
       bucket is full. Each starts as soon as backward has
       filled its bucket, and runs while backward goes on.
Bytes: `data_bytes` in `cost/bytes/data.py`.
Must divide: microbatch_sequences x dp | global_sequences.
Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020;
        Rajbhandari et al., "ZeRO", 2020, section 5.

Gradients are summed, never averaged: the loss is already divided by the number of tokens of the
*global* batch, so the sum over ranks is the gradient of the mean. Nothing divides by a degree.

Some buckets are summed over other groups as well: "partial" over the tensor ranks (norms under
sequence parallelism), "tied" over the two ends of the pipeline, all of them over the two ranks that
hold copies of the same stages where microbatches cross the pipeline both ways. Data ranks come
first, so what travels on the later hops is a slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from echelon.core.parameters import EMBEDDING, ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import (
    accumulates_slices,
    plan_buckets,
    shard_degree,
    slice_index,
    zero_stage,
)
from echelon.layout.data_groups import hop_degrees
from echelon.layout.stage import RankPart, shared_by_ends
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.offload import OffloadStore
from echelon.parallel.storage.buckets import Bucket, BucketRule, BucketSlicing
from echelon.parallel.storage.gradients import Reduction
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.quantised_sums import HopSum, QuantisedSums

MAX_IN_FLIGHT = 2
"""Buckets whose sum may be under way while others fill, where something waits for their end."""


def bucket_rule(
    plan: Plan,
    part: RankPart,
    specs: Sequence[ParameterSpec],
    groups: RankGroups,
    offload_store: OffloadStore | None,
    device: torch.device,
) -> BucketRule:
    """Return how the parameters of one rank are cut into buckets and counted in the norm.

    Slices of parameters go to `offload_store`, where there is one.
    In the norm every logical parameter counts on one rank of a (pipeline x tensor) group: of what
    tensor ranks replicate on the first, of a tied embedding on the rank of the first stage, of
    mirrored stages on the earlier rank.
    """
    tied = {spec.name for spec in specs if shared_by_ends(plan, part, spec)}
    here = not (part.mirrored and part.pp_rank >= plan.mesh.pp / 2)
    both_ends = any(stage.first and stage.last for stage in part.stages)
    return BucketRule(
        plans=plan_buckets(plan, part),
        optimizer=plan.mathematics.optimizer,
        counted={
            spec.name: here
            and (_counts_on_all(plan, spec) or groups.tensor.index == 0)
            and (part.first or spec.name not in tied)
            for spec in specs
        },
        uses={
            EMBEDDING: 2 if both_ends and plan.model.tied else 1,
            **{spec.name: plan.layout.experts.chunks for spec in specs if spec.expert is not None},
        },
        gradients=TORCH_DTYPES[plan.mathematics.precision.gradients],
        slicing=_bucket_slicing(plan, groups, expert=False),
        expert_slicing=_bucket_slicing(plan, groups, expert=True),
        offload_store=offload_store,
        fp8_block=plan.mathematics.precision.fp8_block,
        int8_block=plan.mathematics.precision.int8_block,
        buffer_pool=groups.completion.buffer_pool(device),
    )


def _bucket_slicing(plan: Plan, groups: RankGroups, *, expert: bool) -> BucketSlicing:
    return BucketSlicing(
        num_slices=shard_degree(plan, expert=expert),
        index=slice_index(plan, groups.rank, expert=expert),
        adds_slices=accumulates_slices(plan, expert=expert),
    )


def _counts_on_all(plan: Plan, spec: ParameterSpec) -> bool:
    """Return whether tensor ranks hold other parts of a parameter, or count as other data ranks."""
    whole_expert = spec.expert is not None and plan.layout.experts.expert_tp == 1
    return whole_expert or spec.split_dim is not None


@dataclass(slots=True)
class _PendingSum:
    """One sum under way; `wire` is what it gives, and `target` where that is to land."""

    bucket: Bucket
    pending: Pending
    sum: torch.Tensor
    target: torch.Tensor
    next_groups: list[Group]
    add: bool

    def begin_second_hop(self) -> None:
        """Start the second hop of a sum that takes two, once the first one is over."""
        if isinstance(self.pending, HopSum):
            self.pending.begin_second_hop()


@dataclass(frozen=True, slots=True)
class _ReductionGroups:
    """Over which groups a bucket is summed: all data ranks, or a slice each; then the other hops.

    `copies` says that its sums need memory that is to be given back, `quantised` that slices are
    summed in codes.
    """

    data: Group
    shard: Group | None
    quantised: QuantisedSums | None
    next_groups: Mapping[str, Sequence[Group]]
    copies: bool

    @classmethod
    def from_plan(cls, plan: Plan, groups: RankGroups, *, expert: bool) -> _ReductionGroups:
        """Return the route of the buckets of experts, or of all others."""
        sharded = zero_stage(plan, expert=expert) > 0
        replicas = (groups.replicate,) if sharded else ()
        data, shard = groups.data_groups(expert=expert)
        hops = {
            "whole": (*replicas, groups.mirror),
            "partial": (groups.tensor, *replicas, groups.mirror),
            "tied": (groups.tied, *replicas, groups.mirror),
        }
        copies = (sharded and shard.receives_to_sum) or accumulates_slices(plan, expert=expert)
        quantised = None
        if hop_degrees(plan, expert=expert) != (1, 1):
            dtype = TORCH_DTYPES[plan.mathematics.precision.reduction]
            pair = groups.hop_groups(expert=expert)
            quantised = QuantisedSums(plan.layout.zero.reduce, *pair, dtype)
        copies = copies or quantised is not None
        return cls(data, shard if sharded else None, quantised, hops, copies)


class GradientReduction(Reduction):
    """Sum the buckets of one rank over their groups."""

    def __init__(self, plan: Plan, groups: RankGroups) -> None:
        self._dtype = TORCH_DTYPES[plan.mathematics.precision.reduction]
        self._mirror = groups.mirror
        self._groups = {
            expert: _ReductionGroups.from_plan(plan, groups, expert=expert)
            for expert in (False, True)
        }
        precision = plan.mathematics.precision
        self._copies = precision.reduction != precision.gradients or any(
            route.copies for route in self._groups.values()
        )
        self._pending: deque[_PendingSum] = deque()
        self._later: deque[_PendingSum] = deque()
        self._mirrored: list[_PendingSum] = []
        self._finished: set[str] = set()

    @property
    def quantised(self) -> dict[bool, QuantisedSums]:
        """Return what sums in codes, of routed experts and of all else, where something does."""
        found = {expert: route.quantised for expert, route in self._groups.items()}
        return {expert: sums for expert, sums in found.items() if sums is not None}

    def start_step(self) -> None:
        """Forget the slices of the last step."""
        self._finished.clear()

    def before_write(self, bucket: Bucket) -> None:
        """Give a bucket the memory for its gradients, once its last sum has left it."""
        if not bucket.adds_slices:
            return
        while any(pending_sum.bucket is bucket for pending_sum in self._pending):
            self._finish_sum(self._pending.popleft())
        if not bucket.gradients_memory.present:
            bucket.gradients_memory.allocate()
            bucket.gradients[bucket.slots[-1].end :] = 0

    def bucket_is_full(self, bucket: Bucket, *, last: bool) -> None:
        """Start to sum a bucket whose last gradient has just been written.

        The first hop of the sum before it had the time since then, and its second one begins.
        """
        before = self._pending[-1] if self._pending else None
        self._pending.append(
            self._start_first_sum(bucket, self._later_groups(bucket) if last else [])
        )
        if before is not None:
            before.begin_second_hop()
        # A sum that has a next hop is not left waiting behind one that has none: its hop comes at
        # the same place on every transport, whether sums have copies there or not.
        while (beyond := len(self._pending) - MAX_IN_FLIGHT) > 0 and (
            self._copies or any(one.next_groups for one in islice(self._pending, beyond))
        ):
            self._finish_sum(self._pending.popleft())

    def finish(self) -> None:
        """Return when this rank's gradients are the sums over all ranks."""
        for pending_sum in self._pending:
            pending_sum.begin_second_hop()
        for flights in (self._pending, self._later):
            while flights:
                self._finish_sum(flights.popleft())
        # Both ranks of a pair come to their buckets in orders of their own; they sum in that of the
        # names, when they have all.
        for pending_sum in sorted(self._mirrored, key=lambda flight: flight.bucket.index):
            self._start_next_sum(pending_sum)
        self._mirrored.clear()
        while self._later:
            self._finish_sum(self._later.popleft())

    def _later_groups(self, bucket: Bucket) -> list[Group]:
        hops = self._groups[bucket.plan.expert].next_groups[bucket.plan.kind]
        return [group for group in hops if group.size > 1]

    def _start_first_sum(self, bucket: Bucket, hops: list[Group]) -> _PendingSum:
        name = f"gradients.{bucket.name}"
        route = self._groups[bucket.plan.expert]
        # Itself, where the dtype is the same; codes are made of the bucket as it is.
        dtype = bucket.gradients.dtype if route.quantised is not None else self._dtype
        whole = bucket.gradients.to(dtype)
        if route.shard is None:
            pending = route.data.all_reduce(whole, name=name, async_op=True)
            return _PendingSum(bucket, pending, whole, bucket.gradients, hops, add=False)
        target = bucket.gradient_slice
        add = bucket.adds_slices and bucket.name in self._finished
        self._finished.add(bucket.name)
        wire = target
        if add or target.dtype != self._dtype:
            wire = torch.empty_like(target, dtype=self._dtype)
        if route.quantised is not None:
            pending = route.quantised.start(wire, whole, name=name)
        else:
            pending = route.shard.reduce_scatter(wire, whole, name=name, async_op=True)
        return _PendingSum(bucket, pending, wire, target, hops, add=add)

    def _finish_sum(self, pending_sum: _PendingSum) -> None:
        """Wait for a sum, put it where it belongs, and start the next hop where there is one.

        Later hops are awaited when backward is over: the other end of a tied embedding comes to its
        sum only after it has got what this stage still has to compute.
        """
        pending_sum.pending.wait()
        target, wire = pending_sum.target, pending_sum.sum
        if pending_sum.add:
            target.add_(wire)
        elif wire is not target:
            target.copy_(wire)
        if pending_sum.bucket.adds_slices:
            pending_sum.bucket.gradients_memory.release()
        if pending_sum.next_groups and pending_sum.next_groups[0] is self._mirror:
            # What it was summed in is not kept until then.
            self._mirrored.append(replace(pending_sum, sum=target, pending=Pending()))
        elif pending_sum.next_groups:
            self._start_next_sum(pending_sum)

    def _start_next_sum(self, pending_sum: _PendingSum) -> None:
        group, *rest = pending_sum.next_groups
        wire = pending_sum.target.to(self._dtype)
        # Both ends of a pipeline sum the tied embedding, each from a bucket of another number.
        bucket = pending_sum.bucket
        name = "tied" if bucket.plan.kind == "tied" else bucket.name
        pending = group.all_reduce(wire, name=f"gradients.{name}", async_op=True)
        self._later.append(
            _PendingSum(pending_sum.bucket, pending, wire, pending_sum.target, rest, add=False)
        )
