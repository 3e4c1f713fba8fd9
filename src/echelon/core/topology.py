"""Where ranks sit on a cluster: the links between two of them, and what a group of them gets.

Rank r is device r of the cluster: ranks of a node are neighbours. A tier of links joins aligned
blocks of `degree` devices. A group is `degree` ranks `stride` apart; the mesh lays such groups side
by side from rank 0, so one that does not divide a block has a neighbour that straddles two, and
the slowest of them is what counts. All groups of an axis send at once: where the devices of a node
share `interfaces` into a network, each has its share of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.cluster import Cluster, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Give the way between two ranks: the links, bytes/s each way, and seconds of a message's hop.

    `bandwidth` is what the two get alone, `shared` what they get where every device of their nodes
    sends at once. Between a rank and itself there is no link: it reads its own memory.
    """

    link: Link | None
    bandwidth: float
    shared: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWay:
    """Give what the groups of an axis have of a cluster.

    `link` is the slowest tier that they cross (None for a group of one), `per_node` how many ranks
    of a group are on one node, `nodes` on how many its ranks are. `ring` is bytes/s each way that
    every rank of a ring gets, with one rank of each node sending on to the next node by all the
    interfaces of its group there; `pair` what two ranks get that are in different blocks of `link`.
    """

    link: Link | None
    per_node: int
    nodes: int
    ring: float
    pair: float


def path(cluster: Cluster, first: int, second: int) -> Path:
    """Return the way from rank `first` to rank `second`; IndexError where there is no such rank."""
    for rank in (first, second):
        if not 0 <= rank < cluster.num_devices:
            raise IndexError(f"rank {rank} is outside a cluster of {cluster.num_devices} devices")
    if first == second:
        own = cluster.device.memory_bandwidth
        return Path(link=None, bandwidth=own, shared=own, latency_s=0.0)
    link = next(link for link in cluster.links if first // link.degree == second // link.degree)
    return Path(
        link=link,
        bandwidth=link.bandwidth,
        shared=shared_bandwidth(cluster, link),
        latency_s=link.latency_s,
    )


def crossed_tier(cluster: Cluster, degree: int, stride: int) -> Link | None:
    """Return the fastest tier that joins every group of `degree` ranks `stride` apart."""
    if degree == 1:
        return None
    span = degree * stride
    for link in cluster.links:
        if link.degree % span == 0 or link.degree >= cluster.num_devices:
            return link
    raise ValueError(f"{degree} ranks {stride} apart are more than {cluster.num_devices} devices")


def fast_domain(cluster: Cluster) -> int:
    """Return how many devices are joined as those of a node are: a node, or a rack wired like one.

    NVLink joins 72 of a GB200 rack, whose nodes have 4. Where nodes have one device, the fastest of
    several tiers counts.
    """
    node = cluster.devices_per_node
    inside = crossed_tier(cluster, node, 1)
    if inside is None and len(cluster.links) > 1:
        inside = cluster.links[0]
    return node if inside is None else max(node, inside.degree)


def domain_text(cluster: Cluster) -> str:
    """Return what `fast_domain` counts, for sentences: ``nodes of 8``, ``NVLink 5 domains of 72``.

    Of a link the first two words are its name.
    """
    domain = fast_domain(cluster)
    if domain == cluster.devices_per_node:
        return f"nodes of {domain}"
    name = " ".join(next(link for link in cluster.links if link.degree == domain).name.split()[:2])
    return f"{name} domains of {domain}"


def shared_bandwidth(cluster: Cluster, link: Link) -> float:
    """Return the bytes/s of one device over `link` where all devices of its node send at once."""
    if not link.interfaces:
        return link.bandwidth
    return link.bandwidth * min(1.0, link.interfaces / cluster.devices_per_node)


def ranks_per_node(cluster: Cluster, degree: int, stride: int) -> int:
    """Return how many ranks of a group are on one node: the fewest that any group has on any."""
    node, span = cluster.devices_per_node, degree * stride
    if span <= node:
        return degree if node % span == 0 else 1
    return max(1, node // stride)


def nodes_of_group(cluster: Cluster, degree: int, stride: int) -> int:
    """Return on how many nodes the ranks of a group are, of the group that is on most."""
    node, span = cluster.devices_per_node, degree * stride
    if span <= node:
        return 1 if node % span == 0 else min(degree, 2)
    return min(degree, -(-span // node))


def crowded(cluster: Cluster, computing: int) -> Cluster:
    """Return the cluster as `computing` ranks of each node have it that are all at work at once.

    Where devices have cores of their own it is the same; else each has its share of them, for what
    it computes and for what it sends, which is work of its core too.
    """
    device = cluster.device
    share = device.share(computing)
    if share == 1.0:
        return cluster
    slower = replace(
        device,
        memory_bandwidth=share * device.memory_bandwidth,
        peak_flops=tuple((dtype, share * flops) for dtype, flops in device.peak_flops),
        efficiency=replace(device.efficiency, launch_s=device.efficiency.launch_s / share),
        cores=0.0,
    )
    links = tuple(
        replace(link, bandwidth=share * link.bandwidth, latency_s=link.latency_s / share)
        for link in cluster.links
    )
    return replace(cluster, device=slower, links=links)


def group_way(cluster: Cluster, degree: int, stride: int) -> GroupWay:
    """Return what every group of `degree` ranks `stride` apart gets where all of them send.

    A ring is as fast as its slowest part: the links inside of nodes, or the interfaces that the
    ranks of one node have together.
    """
    link = crossed_tier(cluster, degree, stride)
    if link is None:
        own = cluster.device.memory_bandwidth
        return GroupWay(link=None, per_node=1, nodes=1, ring=own, pair=own)
    per_node = ranks_per_node(cluster, degree, stride)
    nodes = nodes_of_group(cluster, degree, stride)
    far = shared_bandwidth(cluster, link)
    ring = far
    if nodes > 1 and per_node > 1:
        inside = crossed_tier(cluster, per_node, stride)
        assert inside is not None, "a group of several ranks crosses a tier"
        ring = min(inside.bandwidth, per_node * far)
    return GroupWay(link=link, per_node=per_node, nodes=nodes, ring=ring, pair=far)
