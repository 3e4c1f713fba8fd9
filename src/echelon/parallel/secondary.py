# SPDX-License-Identifier: Apache-2.0
"""Secondary slices: gathers of one step cross nodes once (hpZ of ZeRO++).

Split: what was gathered over all nodes, into one slice for each rank of a node that shares it out.
Sent:  the first gather of a bucket in a step goes over all ranks (`zero.py`); from what it got each
       rank copies its secondary slice, and every later gather of the step, in forward passes of
       later microbatches and in all backward passes, stays inside of the node.
Bytes: `data_bytes` in `cost/bytes/data.py`, by tier `parameter_gather_tiers` in
       `cost/bytes/sent.py`.
Must divide: each node holds as many of the ranks, more than one (`secondary-needs-nodes`).
Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training", 2023, section 3.2.

Parameters change with the update at the end of a step and at no other time, so slices are right
until then, over all microbatches; after it they are those of old parameters, and not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.core.plan import Plan
from echelon.layout.secondary import secondary_elements
from echelon.parallel.buckets import Bucket
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.device_mesh import RankGroups


class SecondarySlices:
    """The secondary slices of a rank, and whether they have the values of this step."""

    def __init__(self, buckets: Sequence[Bucket], nodes: tuple[Group, Group]) -> None:
        """Make room for those of `buckets` that are cut between uses.

        `nodes` are the ranks of this node that share them out: of routed experts the second group.
        """
        self._nodes = nodes
        self._slices = {
            bucket.name: torch.empty(
                bucket.plan.num_elements // nodes[bucket.plan.expert].size,
                dtype=bucket.values.dtype,
                device=bucket.values.device,
            )
            for bucket in buckets
            if bucket.plan.sliced and nodes[bucket.plan.expert].size > 1
        }
        self._kept: set[str] = set()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of all slices."""
        return list(self._slices.values())

    def has(self, bucket: Bucket) -> bool:
        """Return whether the ranks of this node have the values of a bucket."""
        return bucket.name in self._kept

    def keep(self, bucket: Bucket) -> None:
        """Copy the slice of this rank out of a bucket that is whole, unless it was done."""
        if bucket.name not in self._slices or bucket.name in self._kept:
            return
        piece, group = self._slices[bucket.name], self._nodes[bucket.plan.expert]
        start = group.index * piece.numel()
        piece.copy_(bucket.values.detach()[start : start + piece.numel()])
        self._kept.add(bucket.name)

    def gather(self, bucket: Bucket) -> Pending:
        """Start to fill a bucket, whose memory is there, from the ranks of this node."""
        whole, piece = bucket.values, self._slices[bucket.name]
        if bucket.fp8 is not None:
            # Gloo sends no floats of 8 bits, but bytes.
            whole, piece = whole.view(torch.uint8), piece.view(torch.uint8)
        return self._nodes[bucket.plan.expert].all_gather(
            whole, piece, name=f"parameters.{bucket.name}", async_op=True
        )

    def forget(self) -> None:
        """Learn that parameters may change from here on: a step or an evaluation is over."""
        self._kept.clear()


def secondary_slices(
    plan: Plan, buckets: Sequence[Bucket], groups: RankGroups
) -> SecondarySlices | None:
    """Return what the ranks of a node keep under a plan; None where they keep nothing."""
    kept = [bucket for bucket in buckets if secondary_elements(plan, bucket.plan)]
    if not kept:
        return None
    return SecondarySlices(kept, (groups.shard_within, groups.expert_shard_within))
