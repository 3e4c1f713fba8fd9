# SPDX-License-Identifier: Apache-2.0
"""Settings of replicas: servers, local SGD, and which groups sum and gather by which algorithm."""

from __future__ import annotations

from typing import cast

from echelon.config.derived.experts import (
    expert_stage,
    expert_tp,
    has_experts,
    ranks_with_the_same_experts,
)
from echelon.config.view import View, mesh_of, record
from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.choices.collective_algorithms import BACKEND, COLLECTIVE_ALGORITHMS, fits_group
from echelon.core.choices.local_sgd import AllIslands, LocalSgd
from echelon.core.choices.updates import Updates
from echelon.core.cluster import Cluster
from echelon.core.plan import Collectives
from echelon.cost.seconds.collectives import automatic_algorithm

EVERY_KEY, ISLANDS_KEY = "local_sgd.every", "local_sgd.islands"
MIN_ISLANDS_KEY, RESTARTS_KEY = "local_sgd.min_islands", "local_sgd.restarts"
RATE_KEY, MOMENTUM_KEY = "local_sgd.outer_learning_rate", "local_sgd.outer_momentum"

NESTEROV = (0.7, 0.9)
"""Rate and momentum that DiLoCo found best for Nesterov's (Douillard et al., 2023, section 3)."""
AVERAGING = (1.0, 0.0)
"""Rate and momentum of plain SGD that make of islands their mean."""


def read_local_sgd(view: View) -> tuple[LocalSgd, dict[str, tuple[object, str]]]:
    """Return how often replicas meet, and value and source of what was left to us."""
    if not view.integer(EVERY_KEY):
        return LocalSgd(), {}
    outer = view.word("local_sgd.outer")
    derived: dict[str, tuple[object, str]] = {}
    found: dict[str, float] = {}
    for key, value in zip(
        (RATE_KEY, MOMENTUM_KEY), NESTEROV if outer == "nesterov" else AVERAGING, strict=True
    ):
        if view.value(key) == "auto":
            found[key], derived[key] = value, (value, f'derived: local_sgd.outer = "{outer}"')
        else:
            found[key] = view.number(key)
    islands = view.integer("mesh.dp_replicate")
    if view.value(ISLANDS_KEY) == "auto":
        derived[ISLANDS_KEY] = islands, "derived: mesh.dp_replicate"
    local = record(
        view,
        LocalSgd,
        "local_sgd",
        islands=islands,
        outer_learning_rate=found[RATE_KEY],
        outer_momentum=found[MOMENTUM_KEY],
        min_islands=min_islands_of(view),
    )
    return local, derived


def min_islands_of(view: View) -> int | AllIslands:
    """Return with how many islands a run goes on; a number that is that of all is "all"."""
    value = view.value(MIN_ISLANDS_KEY)
    return "all" if value in ("all", view.integer("mesh.dp_replicate")) else cast(int, value)


COUNT_KEY, UPDATES_KEY = "servers.count", "servers.updates"
STALENESS_KEY, DAMPING_KEY = "servers.max_staleness", "servers.damping"


def read_updates(view: View) -> Updates:
    """Return when servers update."""
    return record(view, Updates, "servers")


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
