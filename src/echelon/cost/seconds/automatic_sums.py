# SPDX-License-Identifier: Apache-2.0
"""What "auto" means of sums on a cluster: the hierarchy where it is faster than the backend's ring.

Asked once for a cluster, of all its devices and a long message, so that a search and a plan come to
the same answer. A hierarchy sends less between nodes, 2 (k-1)/k M of each where a ring sends
2 (n-1)/n M, but what it sends inside of nodes comes before and after that, not at the same time:
with l = k = 2 it is faster where links inside are twice as fast as what a node has to others.
"""

from __future__ import annotations

from echelon.core.choices.collective_algorithms import BACKEND, HIERARCHICAL, algorithm_index
from echelon.core.cluster import Cluster
from echelon.cost.inputs.group_links import group_link_numbers
from echelon.cost.seconds.from_plan import machine_numbers_from_cluster
from echelon.cost.seconds.links.collectives import sum_seconds

LONG_BYTES = 64e6  # of gradients


def automatic_algorithm(cluster: Cluster) -> tuple[str, str]:
    """Return what "auto" means on a cluster, for the groups that fit it, and why."""
    if cluster.backend == "nccl":
        return BACKEND, "NCCL lays its rings and trees over the machine"
    if cluster.nodes == 1 or cluster.devices_per_node == 1:
        return BACKEND, "there are no several nodes of several devices"
    machine = machine_numbers_from_cluster(cluster)
    way = group_link_numbers(machine, float(cluster.num_devices), 1.0)
    flat, stepped = (
        float(sum_seconds(way, LONG_BYTES, float(algorithm_index(name))))
        for name in (BACKEND, HIERARCHICAL)
    )
    says = f"{1000 * stepped:.3g} ms for 64 MB, {1000 * flat:.3g} in one ring of all ranks"
    return (HIERARCHICAL if stepped < flat else BACKEND), says
