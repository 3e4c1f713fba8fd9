# SPDX-License-Identifier: Apache-2.0
"""Links that a group of ranks has: inside of nodes, between them, and as one ring.

A group of `degree` ranks, `stride` apart, uses the fastest tier that joins all of its ranks. Where
that is a network, its nodes hold several ranks of it each, whose ways into the network it uses
together; the groups beside it use the others at the same time: each rank has its share of its
node's interfaces. Bus bandwidth is that of the slowest part: the tier inside of nodes, or the
interfaces of the ranks of one node together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import MachineNumbers, Num


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinkNumbers:
    """Give what a group of `degree` ranks gets of its links.

    `ranks_per_node` of its ranks are in one node (or all). Bandwidths are bytes/s of one rank
    inside of nodes and between them, and those of a ring; latencies are those of a hop;
    `half_bytes` is the message that reaches half of the bandwidth.
    """

    degree: Num
    ranks_per_node: Num
    node_bandwidth: Num
    network_bandwidth: Num
    bus_bandwidth: Num
    node_latency_s: Num
    latency_s: Num
    half_bytes: Num


def group_link_numbers(machine: MachineNumbers, degree: Num, stride: Num) -> GroupLinkNumbers:
    """Return what a group of `degree` ranks that are `stride` apart gets."""
    span = degree * stride
    first = machine.tiers[0]
    near, near_latency = first.bandwidth * first.efficiency, first.latency_s
    far, latency, half, local = near, near_latency, first.half_bytes, degree
    within = first.degree
    for tier in machine.tiers[1:]:
        beyond = span > within
        local = np.where(
            beyond & (np.asarray(within) >= machine.node),
            np.minimum(degree, np.maximum(1.0, machine.node / stride)),
            local,
        )
        far = np.where(beyond, tier.bandwidth * tier.efficiency, far)
        latency = np.where(beyond, tier.latency_s, latency)
        half = np.where(beyond, tier.half_bytes, half)
        within = tier.degree
    crosses = local < degree
    bus = np.where(crosses, np.minimum(near, local * far), far)
    return GroupLinkNumbers(
        degree=degree,
        ranks_per_node=local,
        node_bandwidth=near,
        network_bandwidth=far,
        bus_bandwidth=np.where((np.asarray(local) == 1.0) & crosses, far, bus),
        node_latency_s=near_latency,
        latency_s=latency,
        half_bytes=half,
    )


def library_group_links(work: CostInputs, degree: Num, stride: Num) -> GroupLinkNumbers:
    """Return what a collective of the library's own has of the links of a group."""
    way, hops = pairwise_group_links(work, degree, stride), work.software.own_hops
    return replace(way, node_latency_s=hops * way.node_latency_s, latency_s=hops * way.latency_s)


def pairwise_group_links(work: CostInputs, degree: Num, stride: Num) -> GroupLinkNumbers:
    """Return what a group has of its links: in a ring, or with all pairs of ranks at once."""
    way, more = group_link_numbers(work.machine, degree, stride), work.software.pair_hops
    ring = np.maximum(way.ranks_per_node - 1.0, 1.0)
    share = (1.0 + more * (ring - 1.0)) / ring
    share = np.where(np.asarray(work.software.by_pairs) > 0, share, 1.0)
    return replace(way, node_latency_s=share * way.node_latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroupLinks:
    """Give what the groups of ranks have of the links that weights are cut or repeated over.

    `shared` are those of most weights, `routed` those of routed experts: as gathers and scatters
    use them, and as an all-reduce does (`*_sum`). `replicate` repeats both.
    """

    shared: GroupLinkNumbers
    shared_sum: GroupLinkNumbers
    routed: GroupLinkNumbers
    routed_sum: GroupLinkNumbers
    replicate: GroupLinkNumbers


def data_group_links(work: CostInputs) -> DataGroupLinks:
    """Return the groups over which weights are cut and repeated, and those of experts."""
    layout = work.layout
    inner, cut = layout.ep * layout.expert_tp, layout.expert_shard
    return DataGroupLinks(
        shared=pairwise_group_links(work, layout.shard, layout.tp),
        shared_sum=library_group_links(work, layout.shard, layout.tp),
        routed=pairwise_group_links(work, cut, inner),
        routed_sum=library_group_links(work, cut, inner),
        replicate=library_group_links(
            work,
            # Islands of local SGD sum nothing in a step (`seconds/data.py`).
            np.where(layout.apart, 1.0, layout.dp_replicate),
            layout.tp * layout.shard,
        ),
    )
