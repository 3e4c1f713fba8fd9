# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives over the tiers of a cluster.

What a group of ranks has of the links is in `inputs/cost_inputs.py`. n bytes are what every rank
has at the end of an all-gather, or hands to an all-reduce or reduce-scatter. With bus bandwidth B
and latency a of a hop:

    all-gather, reduce-scatter  (g - 1) a + n (g - 1) / (g B)
    all-reduce                  twice that, with hops by trees where that is shorter
    all-to-all                  n (g - l) / (g F) over the network, n (l - 1) / (g N) in the node
    message                     a + n / F

The ranks of a node are l. A message of half_bytes reaches half of it. Source: NCCL tests,
PERFORMANCE.md ("bus bandwidth"); Thakur et al., Optimization of Collective Communication (2005).

"auto" for sums on a cluster is the hierarchy where it is faster than the backend's ring. It is
asked once for a cluster, of all its devices and a long message, so that a search and a plan come to
the same answer. A hierarchy sends less between nodes, 2 (k-1)/k M of each where a ring sends 2
(n-1)/n M, but its messages inside of nodes come before and after that, not at the same time: with l
= k = 2 it is faster where links inside are twice as fast as those of a node to others.
"""

from __future__ import annotations

import numpy as np

from echelon.core.choices.collective_algorithms import BACKEND, HIERARCHICAL, algorithm_index
from echelon.core.cluster import Cluster
from echelon.cost.inputs.cost_inputs import GroupLinkNumbers, group_link_numbers
from echelon.cost.inputs.numbers import Num
from echelon.cost.seconds.from_plan import machine_numbers_from_cluster


def all_gather_seconds(way: GroupLinkNumbers, num_bytes: Num) -> Num:
    """Return the seconds of an all-gather to, or a reduce-scatter of, `num_bytes`."""
    share = (way.degree - 1.0) / way.degree
    seconds = ring_latency(way) + share * (num_bytes + way.half_bytes) / way.bus_bandwidth
    return np.where(np.asarray(way.degree) > 1.0, seconds, 0.0)


def all_reduce_seconds(way: GroupLinkNumbers, num_bytes: Num) -> Num:
    """Return the seconds of an all-reduce of `num_bytes`."""
    share = 2.0 * (way.degree - 1.0) / way.degree
    nodes = way.degree / way.ranks_per_node
    tree = (
        2.0 * (way.ranks_per_node - 1.0) * way.node_latency_s + 2.0 * np.log2(nodes) * way.latency_s
    )
    latency = np.minimum(2.0 * ring_latency(way), tree + way.latency_s)
    seconds = latency + share * (num_bytes + way.half_bytes) / way.bus_bandwidth
    return np.where(np.asarray(way.degree) > 1.0, seconds, 0.0)


def sum_seconds(way: GroupLinkNumbers, num_bytes: Num, algorithm: Num) -> Num:
    """Return the seconds of an all-reduce by an algorithm, named by its index.

    With l ranks on each of k nodes, M bytes, N and F of one rank inside of nodes and between them,
    B of a ring, and a, b the latencies of hops inside and between:

        tree              2 (log2 l (a + M/N) + log2 k (b + M/B))
        any other         twice an all-gather by it
    """
    default = all_reduce_seconds(way, num_bytes)
    if not np.any(np.asarray(algorithm) > 0):
        return default
    inside, across = np.log2(way.ranks_per_node), np.log2(way.degree / way.ranks_per_node)
    size = num_bytes + way.half_bytes
    up = inside * (way.node_latency_s + size / way.node_bandwidth)
    up = up + across * (way.latency_s + size / way.bus_bandwidth)
    tree = np.asarray(algorithm) == algorithm_index("tree")
    default = np.where(tree, 2.0 * up, default)
    return 2.0 * gather_seconds(way, num_bytes, algorithm, direct=default / 2.0)


def gather_seconds(way: GroupLinkNumbers, num_bytes: Num, algorithm: Num, *, direct: Num) -> Num:
    """Return the seconds of an all-gather to, or a reduce-scatter of, `num_bytes` by an algorithm.

    `direct` are those where it has none of its own, or does not fit. In the letters of
    `sum_seconds` and with all links of a step busy at once:

        ring              as `all_gather_seconds`
        halving-doubling  log2 l a + log2 k b + (k-1)/k M/F + (l-1)/l M/(k N)
        hierarchical      a + (l-1)/l M/N + (k-1) (b + M/(k l F))
    """
    chosen, local = np.asarray(algorithm), way.ranks_per_node
    if not np.any(chosen > 0):
        return direct
    nodes, size = way.degree / local, num_bytes + way.half_bytes
    near, far = size / way.node_bandwidth, size / way.network_bandwidth
    rest, ends = (local - 1.0) / local, (nodes - 1.0) / nodes
    hops = np.log2(local) * way.node_latency_s + np.log2(nodes) * way.latency_s
    seconds = {
        "ring": all_gather_seconds(way, num_bytes),
        "halving-doubling": hops + ends * far + rest * near / nodes,
        HIERARCHICAL: way.node_latency_s
        + rest * near
        + (nodes - 1.0) * way.latency_s
        + ends * far / local,
    }
    found = direct
    for name, each in seconds.items():
        fits = (local > 1.0) & (nodes > 1.0) if name == HIERARCHICAL else np.asarray(True)
        found = np.where((chosen == algorithm_index(name)) & fits, each, found)
    return np.where(np.asarray(way.degree) > 1.0, found, 0.0)


def all_to_all_seconds(way: GroupLinkNumbers, num_bytes: Num) -> Num:
    """Return the seconds of an all-to-all in which every rank has `num_bytes` to hand out."""
    far = num_bytes * (way.degree - way.ranks_per_node) / way.degree / way.network_bandwidth
    near = num_bytes * (way.ranks_per_node - 1.0) / way.degree / way.node_bandwidth
    seconds = way.latency_s * np.sqrt(way.degree) + np.maximum(far, near)
    seconds = seconds + way.half_bytes / way.bus_bandwidth
    return np.where(np.asarray(way.degree) > 1.0, seconds, 0.0)


def point_to_point_seconds(way: GroupLinkNumbers, num_bytes: Num) -> Num:
    """Return the seconds of a message from one rank of a group to the next."""
    each = np.where(
        np.asarray(way.ranks_per_node) < way.degree, way.network_bandwidth, way.node_bandwidth
    )
    seconds = way.latency_s + (num_bytes + way.half_bytes) / each
    return np.where(np.asarray(way.degree) > 1.0, seconds, 0.0)


def ring_latency(way: GroupLinkNumbers) -> Num:
    """Return the seconds of the hops of a ring: inside of nodes, and from node to node."""
    nodes = way.degree / way.ranks_per_node
    return (way.ranks_per_node - 1.0) * nodes * way.node_latency_s + np.where(
        np.asarray(way.ranks_per_node) < way.degree, nodes * way.latency_s, 0.0
    )


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
