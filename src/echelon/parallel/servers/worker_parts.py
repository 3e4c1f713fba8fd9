# SPDX-License-Identifier: Apache-2.0
"""What takes the gradients of a rank of the grid, and what brings its parameters together."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.plan import Plan
from echelon.layout.buckets import stage_units
from echelon.layout.stage import RankPart
from echelon.parallel.buckets import Bucket
from echelon.parallel.data import GradientReduction
from echelon.parallel.servers.messages import WorkerMessages
from echelon.parallel.servers.worker import GradientPush, PulledParameters
from echelon.parallel.transport.device_mesh import RankGroups
from echelon.parallel.zero import ParameterGathering, make_gathering


def gradient_reduction(plan: Plan, groups: RankGroups) -> GradientReduction:
    """Return what takes the gradients of a rank of the grid."""
    if plan.mathematics.updates.is_asynchronous:
        return WorkerMessages(plan, groups)
    return GradientPush(plan, groups) if plan.mesh.servers else GradientReduction(plan, groups)


def parameter_gathering(
    plan: Plan, part: RankPart, buckets: Sequence[Bucket], groups: RankGroups
) -> ParameterGathering:
    """Return what makes the units of a rank of the grid whole."""
    if plan.mesh.servers:
        units = [stage_units(one) for one in part.stages]
        return PulledParameters(plan, groups, buckets, units)
    return make_gathering(plan, part, buckets, groups)
