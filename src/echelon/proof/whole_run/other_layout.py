# SPDX-License-Identifier: Apache-2.0
"""Choose the layout under which a run is resumed: the same mathematics on the same ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from echelon.config.rules.plan import require_trainable
from echelon.core.axis import MESH_AXES
from echelon.core.errors import ConfigError
from echelon.core.mesh import Mesh
from echelon.core.plan import Layout, Pipeline, Plan, Recompute, Zero
from echelon.cost.seconds.stages import split_layers
from echelon.layout.stage import with_rounding


def other_layout(plan: Plan) -> Plan:
    """Return the plan under another layout: of those that differ on most axes, one by its hash.

    Where no other is legal, it is the same layout.
    """
    legal = [one for one in _candidates(plan) if _is_legal(one)]
    if not legal:
        return plan
    most = max(_distance(plan, one) for one in legal)
    furthest = [one for one in legal if _distance(plan, one) == most]
    return random.Random(plan.content_hash()).choice(furthest)


def _candidates(plan: Plan) -> Iterator[Plan]:
    layout, world = plan.layout, plan.mesh.world_size
    for degrees in _meshes(world):
        mesh = replace(degrees, replicas_outermost=plan.mesh.replicas_outermost)
        if mesh.pp > plan.model.layers:
            continue
        sliced = mesh.dp_shard > 1 or mesh.cp > 1
        other = Layout(
            mesh=mesh,
            # The auxiliary loss may be one of microbatches: these stay as they are.
            microbatch_sequences=layout.microbatch_sequences,
            pipeline=Pipeline(stages=split_layers(plan.model.layers, mesh.pp)),
            zero=Zero(stage=1 if sliced else 0),
            recompute=Recompute(policy="full" if world == 1 else "none"),
        )
        yield replace(plan, layout=with_rounding(plan, other))


def _meshes(world: int) -> Iterator[Mesh]:
    def factors(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for degree in range(1, left + 1):
            if left % degree == 0:
                yield from ((degree, *rest) for rest in factors(left // degree, axes - 1))

    for degrees in factors(world, len(MESH_AXES)):
        named = {axis.value: d for axis, d in zip(MESH_AXES, degrees, strict=True)}
        yield replace(Mesh(), **named)


def _is_legal(plan: Plan) -> bool:
    sequences = plan.layout.microbatch_sequences * plan.mesh.dp
    if plan.mathematics.global_sequences % sequences:
        return False
    try:
        require_trainable(plan)
    except ConfigError:
        return False
    return True


def _distance(one: Plan, other: Plan) -> int:
    return sum(one.mesh.degree(axis) != other.mesh.degree(axis) for axis in MESH_AXES)
