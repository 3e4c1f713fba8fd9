# SPDX-License-Identifier: Apache-2.0
"""What a run runs on: devices, how many to a node, and the links between them.

Bandwidths are bytes per second in one direction; vendors' bidirectional and bit figures are
converted where a preset is written, with its source, never later.

Rank r is device r of the cluster: ranks of a node are neighbours. A tier of links joins aligned
blocks of `degree` devices. A group is `degree` ranks `stride` apart; the mesh lays such groups side
by side from rank 0, so one that does not divide a block has a neighbour that straddles two, and
the slowest of them is what counts. All groups of an axis send at once: where the devices of a node
share `interfaces` into a network, each has its share of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Backend = Literal["gloo", "nccl"]

TRAINER_CONSTANTS = (
    *("host_s", "width_bytes", "inner_bytes", "logit_bytes", "optimizer_bytes", "step_s"),
    *("own_hops", "pair_hops", "adding_bytes"),
)
"""Fields of `cost.seconds.trainer.Software` that `echelon calibrate` finds by steps of plans."""
NOT_MEASURED = "none"
"""Of a device whose kernels nobody measured by themselves."""
PCIE_4_BYTES_PER_S = 31.508e9
"""What PCI Express 4.0 x16 carries each way: 16 GT/s x 16 lanes x 128 / 130 / 8."""
STEP_ERROR = "step_error"
"""The field of how far off these were: the mean error of steps that were measured, not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Say how near to its peaks a device comes: typical of its kind, or measured."""

    matmul: float = 0.8
    """Part of the peak that a product of m x k by k x n reaches when k is large."""
    half_depth: float = 64.0
    """The k at which a product reaches half of `matmul`."""
    tile: int = 128
    """Rows and columns of the result that one unit computes at a time."""
    units: int = 1
    """Streaming multiprocessors or cores, each with a tile at a time."""
    memory: float = 0.8
    """Part of the memory's bandwidth that operators which move bytes reach."""
    attention: float = 0.5
    """Part of the peak that fused attention reaches forward."""
    attention_backward: float = 0.4
    """Part of the peak that fused attention reaches backward."""
    launch_s: float = 5e-6
    """Seconds that a kernel takes to start, on the device or on the host that feeds it."""
    aligned: float = 0.95
    """Factor on the speed of a product for each halving of how its sizes are aligned in memory."""
    half_reach: float = 0.0
    """Keys that a query meets in one call at which fused attention reaches half of its rate."""
    optimizer: float = 0.8
    """Part of the memory's bandwidth that the update of parameters reaches; it reads and writes
    every state once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Give what one device can do: dense peak FLOP/s by dtype, memory and its bandwidth."""

    name: str
    """What its vendor calls it."""
    memory_bytes: int
    """Bytes of memory that its driver offers."""
    memory_bandwidth: float
    """Bytes/s between its memory and its units, read and written together."""
    peak_flops: tuple[tuple[str, float], ...] = ()
    """Dense FLOP/s by dtype."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """What its kernels reach of these figures."""
    cores: float = 0.0
    """Cores that ranks on the processors of one machine share: where more of a node's ranks compute
    at once, each gets its share of a core; 0: every device computes by itself."""
    capability: float = 0.0
    """NVIDIA's compute capability, 9.0 for Hopper: newer GPUs have kernels that older ones have
    not; 0: not known, or none of NVIDIA's."""
    host_bandwidth: float = PCIE_4_BYTES_PER_S
    """Bytes/s of its link to the memory of the host, each way."""
    measured: str = NOT_MEASURED
    """What was measured of our kernels on such a device (`cost/seconds/measured_kernels.toml`)."""

    def flops(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for `dtype`, or None where it is not known."""
        return dict(self.peak_flops).get(dtype)

    def share(self, computing: int) -> float:
        """Return the part of a core that each of `computing` ranks of a node gets, at most one."""
        return min(1.0, self.cores / computing) if self.cores else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Give one tier of links: how many devices it joins, bytes/s per device each way, seconds.

    A long message of a collective reaches `efficiency` of the bandwidth, one of `half_bytes` bytes
    half of that. The devices of a node share `interfaces` ways into a network (0: each its own).
    """

    name: str
    degree: int
    bandwidth: float
    latency_s: float
    efficiency: float = 1.0
    half_bytes: float = 0.0
    interfaces: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Describe a cluster: `nodes` x `devices_per_node` devices, and the links, fastest first.

    `trainer` are constants of our trainer as they were measured there, by their names in
    TRAINER_CONSTANTS, and STEP_ERROR; those that are not there are the usual ones.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    links: tuple[Link, ...]
    backend: Backend = "nccl"
    trainer: tuple[tuple[str, float], ...] = ()

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all nodes."""
        return self.nodes * self.devices_per_node


def joining_tier(cluster: Cluster, degree: int, stride: int) -> Link | None:
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
    inside = joining_tier(cluster, node, 1)
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


def cluster_under_load(cluster: Cluster, computing: int) -> Cluster:
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
