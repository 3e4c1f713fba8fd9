"""Data parallelism: every rank has the same weights and other samples; gradients are summed.

Split: the samples of the global batch.
Sent:  one all-reduce per bucket and step, whatever the number of microbatches; each starts as soon
       as backward has filled its bucket, and runs while backward goes on.
Bytes: `cost.bytes_sent.data_bytes`, 2 (n-1)/n of the gradients.
Must divide: microbatch_sequences x dp | global_sequences.
Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.

Gradients are summed, never averaged: the loss is already divided by the number of tokens of the
*global* batch, so the sum over ranks is the gradient of the mean. Nothing divides by a degree.

Two kinds of bucket are summed twice, and only when backward is over: "partial" over the tensor
ranks first (norms under sequence parallelism), "tied" over the two ends of the pipeline first.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.parameters import EMBEDDING, ParameterSpec
from echelon.core.plan import Plan
from echelon.cost.buckets import plan_buckets
from echelon.cost.stage import StagePart, shared_by_ends
from echelon.parallel.buckets import Bucket, BucketRule
from echelon.parallel.collectives import Group, Pending
from echelon.parallel.device_mesh import RankGroups


def bucket_rule(
    plan: Plan, part: StagePart, specs: Sequence[ParameterSpec], groups: RankGroups
) -> BucketRule:
    """Return how the gradients of one rank are cut into buckets, summed, and counted in the norm.

    In the norm every logical parameter counts on one rank of a (pipeline x tensor) group: of what
    tensor ranks replicate on the first, of a tied embedding on the first stage.
    """
    tied = {spec.name for spec in specs if shared_by_ends(plan, part, spec)}
    return BucketRule(
        plans=plan_buckets(plan, part),
        reductions={
            "whole": (groups.data,),
            "partial": (groups.tensor, groups.data),
            "tied": (groups.tied, groups.data),
        },
        counted={
            spec.name: (spec.split_dim is not None or groups.tensor.index == 0)
            and (part.first or spec.name not in tied)
            for spec in specs
        },
        uses={EMBEDDING: int(part.first) + int(part.last and plan.model.tied)},
    )


class GradientReduction:
    """Sum the buckets of one rank over their groups."""

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self._in_flight: list[Pending] = []
        self._chained: list[Bucket] = []

    def bucket_is_full(self, bucket: Bucket) -> None:
        """Start to sum a bucket whose last gradient has just been written."""
        groups = _groups(bucket)
        if len(groups) == 1:
            self._in_flight.append(_start(bucket, groups[0]))
        elif groups:
            self._chained.append(bucket)

    def finish(self) -> None:
        """Return when the gradients of every bucket are the sums over all ranks."""
        rounds: Sequence[Bucket] = sorted(self._chained, key=lambda bucket: bucket.name)
        self._chained = []
        depth = 0
        while any(len(_groups(bucket)) > depth for bucket in rounds):
            under_way = [
                _start(bucket, _groups(bucket)[depth])
                for bucket in rounds
                if len(_groups(bucket)) > depth
            ]
            for pending in under_way:
                pending.wait()
            depth += 1
        for pending in self._in_flight:
            pending.wait()
        self._in_flight = []


def _groups(bucket: Bucket) -> list[Group]:
    return [group for group in bucket.reductions if group.size > 1]


def _start(bucket: Bucket, group: Group) -> Pending:
    return group.all_reduce(bucket.gradients, name=f"gradients.{bucket.name}", async_op=True)
