# SPDX-License-Identifier: Apache-2.0
"""Settings of collectives: which groups sum and gather, and what "auto" means to them."""

from __future__ import annotations

from echelon.config.derived.experts import (
    expert_stage,
    expert_tp,
    has_experts,
    ranks_with_the_same_experts,
)
from echelon.config.view import View, mesh_of
from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.choices.collective_algorithms import BACKEND, COLLECTIVE_ALGORITHMS, fits_group
from echelon.core.cluster import Cluster
from echelon.core.plan import Collectives
from echelon.cost.seconds.collectives import automatic_algorithm

ALGORITHM_KEY = "collectives.algorithm"
Ranks = tuple[int, ...]


SLICES, EXPERT_SLICES = "slices of the same parameters", "slices of the same experts"
"""What is scattered and gathered, and never summed whole."""


BOTH_ENDS_ON_ONE_RANK = ("zb-v", "dualpipe-v")
"""The schedules whose stages lie in the shape of a V."""


def summing_groups(view: View) -> dict[str, Ranks]:
    """Return the largest group of each kind that sums or gathers, by what it is called.

    Gradients: without ZeRO all who see different tokens sum everything; with it they sum and gather
    slices, which replicas sum again. Rows: tensor ranks. Where there are parameter servers they sum
    gradients, and no group does.
    """
    mesh = mesh_of(view)
    if mesh.servers:
        return {}
    found: dict[str, Ranks] = {}
    if view.integer("zero.stage") > 0:
        found["copies of a slice"] = mesh.group(0, Axis.DP_REPLICATE)
        found[SLICES] = mesh.group(0, *SHARD_AXES)
    else:
        found["the same parameters"] = mesh.group(0, *LOSS_AXES)
    if has_experts(view) and mesh.ep > 1:
        ranks_with_the_same_experts(view)  # Unavailable where it is not known which ones they are.
        if expert_stage(view)[0] > 0:
            found["copies of a slice"] = mesh.group(0, Axis.DP_REPLICATE)
            found[EXPERT_SLICES] = mesh.expert_shard_groups(expert_tp=expert_tp(view))[0]
        else:
            groups = mesh.expert_data_groups(expert_tp=expert_tp(view))
            found["the same experts"] = groups[0]
    found["pieces of the same layers"] = mesh.group(0, Axis.TP)
    schedule, pipe = view.word("pipeline.schedule"), mesh.group(0, Axis.PP)
    if schedule == "dualpipe":
        found["copies of a stage"] = (pipe[0], pipe[-1])
    elif view.flag("model.tied") and schedule not in BOTH_ENDS_ON_ONE_RANK:
        found["the embedding at both ends"] = (pipe[0], pipe[-1])
    return {name: ranks for name, ranks in found.items() if len({*ranks}) > 1}


def groups_of_algorithm(view: View, algorithm: str) -> dict[str, Ranks]:
    """Return those of `summing_groups` that do something by an algorithm, whether it fits or not.

    A tree sums whole tensors alone.
    """
    found = summing_groups(view)
    if COLLECTIVE_ALGORITHMS[algorithm].scatters:
        return found
    return {name: ranks for name, ranks in found.items() if name not in (SLICES, EXPERT_SLICES)}


def read_collectives(
    view: View, cluster: Cluster
) -> tuple[Collectives, dict[str, tuple[object, str]]]:
    """Return how ranks sum and gather, and value and source where it was left to us."""
    chosen = view.word(ALGORITHM_KEY)
    if chosen != "auto":
        return Collectives(algorithm=chosen), {}
    algorithm, why = automatic_algorithm(cluster)
    groups, node = summing_groups(view).values(), cluster.devices_per_node
    if algorithm != BACKEND and not any(fits_group(algorithm, ranks, node) for ranks in groups):
        algorithm, why = BACKEND, "no group that sums has several ranks on each of several nodes"
    return Collectives(algorithm=algorithm), {ALGORITHM_KEY: (algorithm, f"derived: {why}")}
