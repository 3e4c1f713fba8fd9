# SPDX-License-Identifier: Apache-2.0
"""Which ranks sum what a rank has: a bucket, slices of it, and what other axes add to them."""

from __future__ import annotations

from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.layout.secondary import shard_groups
from echelon.schedule.from_plan import stage_placement_from_plan

Ranks = tuple[int, ...]


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
