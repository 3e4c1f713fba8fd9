"""What takes the gradients of a rank of the grid, and what brings its parameters together."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.plan import Plan
from echelon.parallel.buckets import Bucket
from echelon.parallel.data import GradientReduction
from echelon.parallel.secondary import SecondarySlices
from echelon.parallel.servers.messages import WorkerMessages
from echelon.parallel.servers.worker import GradientPush, PulledParameters
from echelon.parallel.transport.device_mesh import RankGroups
from echelon.parallel.zero import ParameterGathering


def gradient_reduction(plan: Plan, groups: RankGroups) -> GradientReduction:
    """Return what takes the gradients of a rank of the grid: a sum over ranks, or the servers."""
    if plan.mathematics.updates.is_asynchronous:
        return WorkerMessages(plan, groups)
    return GradientPush(plan, groups) if plan.mesh.servers else GradientReduction(plan, groups)


def parameter_gathering(
    plan: Plan, groups: RankGroups, buckets: Sequence[Bucket], units: Sequence[Sequence[str]]
) -> ParameterGathering:
    """Return what brings the parameters of a rank of the grid together."""
    if plan.mesh.servers:
        return PulledParameters(plan, groups, buckets, units)
    shards = groups.shard, groups.expert_shard
    secondary = SecondarySlices(buckets, (groups.shard_within, groups.expert_shard_within))
    return ParameterGathering(buckets, units, shards, plan.layout.zero, secondary)
