"""Bytes of parameter gathers inside of nodes and between them, exact for each rank.

A gather over n ranks is a message of the own piece to each of the n-1 others: of l ranks on the own
node, l-1 go inside, n-l to other nodes. In a step of M microbatches, with G bytes in the buckets of
a rank that ZeRO 3 cuts and frees after use, each gathered F times (twice a microbatch: 2 M), a rank
sends to other nodes

    without secondary slices   F (n-l)/n G
    with them                  (n-l)/n G, and (F-1) (l-1)/l G more inside of its node

Source: Wang et al., "ZeRO++", 2023, section 3.2 and table 1 (M for the second gather becomes 0).
"""

from __future__ import annotations

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.data import (
    EXPERT_SHARD_AXIS,
    EXPERT_SHARD_WITHIN_AXIS,
    GATHERED,
    SHARD_WITHIN_AXIS,
    data_bytes,
)
from echelon.layout.buckets import plan_buckets
from echelon.layout.secondary import shard_groups
from echelon.layout.stage import part_of

WITHIN = (SHARD_WITHIN_AXIS, EXPERT_SHARD_WITHIN_AXIS)


def parameter_gather_tiers(plan: Plan, rank: int) -> tuple[int, int]:
    """Return what a rank sends in a step to gather parameters: inside of its node, and beyond."""
    node, near, far = plan.cluster.devices_per_node, 0, 0
    part = part_of(plan, rank)
    for term in data_bytes(plan, part, plan_buckets(plan, part), rank):
        if not term.name.startswith(GATHERED) or not term.bytes:
            continue
        if term.axis in WITHIN:
            near += term.bytes
        elif term.axis in (Axis.DP_SHARD.value, EXPERT_SHARD_AXIS):
            groups = shard_groups(plan, expert=term.axis == EXPERT_SHARD_AXIS)
            group = next(ranks for ranks in groups if rank in ranks)
            here = sum(other // node == rank // node for other in group) - 1
            near += term.bytes * here // (len(group) - 1)
            far += term.bytes * (len(group) - 1 - here) // (len(group) - 1)
    return near, far
