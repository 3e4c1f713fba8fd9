# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that share out and sum: all of them, those of a node, ends and mirrors.

n ranks share out the parameters of a bucket, l of them on each of several nodes. The first gather
of a step crosses nodes; each rank then keeps 1/l of what it got, and every later gather of the step
is one over the l ranks of its node. Gradients may be summed over these first, then over the ranks
of the same place on all nodes. Source: Wang et al., "ZeRO++", 2023, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.choices.collective_algorithms import members_per_node
from echelon.core.plan import Plan
from echelon.layout.buckets import BucketPlan, shard_degree, zero_stage
from echelon.schedule.from_plan import stage_placement_from_plan

Ranks = tuple[int, ...]


def ranks_per_node(groups: Sequence[Ranks], devices_per_node: int) -> int:
    """Return l where each group has l > 1 ranks on each of several nodes; else 1."""
    counts = {members_per_node(ranks, devices_per_node) for ranks in groups}
    local = counts.pop() if len(counts) == 1 else 0
    return local if 1 < local < len(groups[0]) else 1


def shard_groups(plan: Plan, *, expert: bool = False) -> tuple[Ranks, ...]:
    """Return the groups over which ZeRO cuts slices, of routed experts or of all else."""
    if expert:
        return plan.mesh.expert_shard_groups(expert_tp=plan.layout.experts.expert_tp)
    return plan.mesh.groups(*SHARD_AXES)


def secondary_degree(plan: Plan, *, expert: bool = False) -> int:
    """Return over how many ranks of a node secondary slices are cut; 1 where there are none."""
    zero = plan.layout.zero
    if not (zero.secondary and zero.reshard_after_forward):
        return 1
    if zero_stage(plan, expert=expert) < 3 or (expert and plan.model.experts is None):
        return 1
    return _sharers_per_node(plan, expert=expert)


@lru_cache(maxsize=64)
def _sharers_per_node(plan: Plan, *, expert: bool) -> int:
    """Return how many ranks of each node share out; 1 where nodes have unequal numbers of them."""
    return ranks_per_node(shard_groups(plan, expert=expert), plan.cluster.devices_per_node)


def hop_degrees(plan: Plan, *, expert: bool = False) -> tuple[int, int]:
    """Return l and k where gradients are summed over l ranks of each node, then over k nodes.

    (1, 1) where they are summed at once.
    """
    summed = zero_stage(plan, expert=expert) > 0 and plan.layout.zero.reduce != "exact"
    if not summed or (expert and plan.model.experts is None):
        return 1, 1
    near = _sharers_per_node(plan, expert=expert)
    return (near, shard_degree(plan, expert=expert) // near) if near > 1 else (1, 1)


def node_groups(plan: Plan, *, expert: bool = False) -> tuple[Ranks, ...]:
    """Return the ranks of each node that share out the same parameters, where it matters."""
    if secondary_degree(plan, expert=expert) == 1 and hop_degrees(plan, expert=expert) == (1, 1):
        return ()
    return tuple(part for parts in _by_node(plan, expert=expert) for part in parts)


def across_groups(plan: Plan, *, expert: bool = False) -> tuple[Ranks, ...]:
    """Return the ranks of the same place on each node, where gradients take a second hop."""
    if hop_degrees(plan, expert=expert) == (1, 1):
        return ()
    by_node = _by_node(plan, expert=expert)
    return tuple(ranks for parts in by_node for ranks in zip(*parts, strict=True))


def _by_node(plan: Plan, *, expert: bool) -> list[list[Ranks]]:
    """Return each group as the parts of it that are on a node."""
    size = plan.cluster.devices_per_node
    return [
        [tuple(ranks) for _, ranks in groupby(group, lambda rank: rank // size)]
        for group in shard_groups(plan, expert=expert)
    ]


def secondary_elements(plan: Plan, bucket: BucketPlan) -> int:
    """Return the elements of a rank's secondary slice of a bucket; 0 where it has none."""
    degree = secondary_degree(plan, expert=bucket.expert)
    return bucket.num_elements // degree if bucket.sliced and degree > 1 else 0


def gradient_ranks(plan: Plan, rank: int, *, expert: bool) -> Ranks:
    """Return the ranks that sum the gradients of `rank`."""
    if not expert:
        return plan.mesh.group(rank, *LOSS_AXES)
    groups = plan.mesh.expert_data_groups(expert_tp=plan.layout.experts.expert_tp)
    return next(ranks for ranks in groups if rank in ranks)


def shard_ranks(plan: Plan, rank: int, *, expert: bool) -> Ranks:
    """Return the ranks that hold the other slices of what `rank` has slices of."""
    if not expert:
        return plan.mesh.group(rank, *SHARD_AXES)
    return next(ranks for ranks in shard_groups(plan, expert=True) if rank in ranks)


def end_ranks(plan: Plan, rank: int) -> Ranks:
    """Return the ranks of the first and the last stage of the pipeline that `rank` is in."""
    placement, pipe = stage_placement_from_plan(plan), plan.mesh.group(rank, Axis.PP)
    return pipe[placement.stage_ranks[0]], pipe[placement.stage_ranks[-1]]


def mirror_ranks(plan: Plan, rank: int) -> Ranks:
    """Return `rank` and the rank at the same place from the other end of its pipeline."""
    pipe = plan.mesh.group(rank, Axis.PP)
    return tuple(sorted((rank, pipe[-1 - pipe.index(rank)])))
