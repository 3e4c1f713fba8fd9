"""Settings of collectives: which groups sum gradients, and what "auto" means to them."""

from __future__ import annotations

from echelon.config.settings.experts import (
    expert_stage,
    expert_tp,
    has_experts,
    ranks_with_the_same_experts,
)
from echelon.config.view import View, mesh_of
from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.choices.collective_algorithms import BACKEND, fits_group
from echelon.core.cluster import Cluster
from echelon.core.plan import Collectives
from echelon.cost.automatic_sums import automatic_algorithm

ALGORITHM_KEY = "collectives.algorithm"
Ranks = tuple[int, ...]


def summing_groups(view: View) -> dict[str, Ranks]:
    """Return the largest group of each kind that sums gradients, by what it is called.

    ZeRO sums slices among replicas alone; without it all who see different tokens sum everything.
    Where there are parameter servers they do, and no group does.
    """
    mesh = mesh_of(view)
    if mesh.servers:
        return {}
    stages = {"parameters": view.integer("zero.stage")}
    if has_experts(view) and mesh.ep > 1:
        ranks_with_the_same_experts(view)  # Unavailable where it is not known which ones they are.
        stages["experts"] = expert_stage(view)[0]
    found: dict[str, Ranks] = {}
    for what, stage in stages.items():
        if stage > 0:
            found["copies of a slice"] = mesh.group(0, Axis.DP_REPLICATE)
        elif what == "experts":
            groups = mesh.expert_data_groups(expert_tp=expert_tp(view))
            found["the same experts"] = groups[0]
        else:
            found["the same parameters"] = mesh.group(0, *LOSS_AXES)
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def read_collectives(
    view: View, cluster: Cluster
) -> tuple[Collectives, dict[str, tuple[object, str]]]:
    """Return how gradients are summed, and value and source where it was left to us."""
    chosen = view.word(ALGORITHM_KEY)
    if chosen != "auto":
        return Collectives(algorithm=chosen), {}
    algorithm, why = automatic_algorithm(cluster)
    groups, node = summing_groups(view).values(), cluster.devices_per_node
    if algorithm != BACKEND and not any(fits_group(algorithm, ranks, node) for ranks in groups):
        algorithm, why = BACKEND, "no group that sums gradients has several ranks on several nodes"
    return Collectives(algorithm=algorithm), {ALGORITHM_KEY: (algorithm, f"derived: {why}")}
