# SPDX-License-Identifier: Apache-2.0
"""Several measured clusters of the same kind of node -> one: the median of each constant.

A share of a peak means something with its peak only, where each machine took the best that it had
reached for its own: what is a median is the rate, share x peak. Constants of products belong to a
size of tiles: they are those of the machines that have the usual one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from echelon.core.cluster import TRAINER_CONSTANTS, Cluster, Device, Link

OF_PEAK = ("matmul", "attention", "attention_backward")
OF_MEMORY = ("memory", "optimizer")
PLAIN = ("half_depth", "launch_s", "aligned")


def median_cluster(clusters: Sequence[Cluster]) -> Cluster:
    """Return the cluster that measured ones tell together, as large as the largest of them.

    All have the same device, and those with links as many devices on a node. Memory and shared
    cores are those of the largest, which its ranks share as they would there.
    """
    widest = max(clusters, key=lambda one: (one.devices_per_node, one.nodes))
    nodes = max(one.nodes for one in clusters)
    total = nodes * widest.devices_per_node
    inside = [link for one in clusters for link in one.links if is_inside(one, link)]
    beyond = [link for one in clusters for link in one.links if not is_inside(one, link)]
    links = [
        replace(median_link(tier), degree=degree)
        for tier, degree in ((inside, widest.devices_per_node), (beyond, total))
        if tier
    ]
    known = [(name, _known(clusters, name)) for name in TRAINER_CONSTANTS]
    return replace(
        widest,
        name=f"{total}x {widest.device.name}",
        device=_median_device([one.device for one in clusters], widest.device),
        nodes=nodes,
        links=tuple(links),
        trainer=tuple((name, median(values)) for name, values in known if values),
    )


def is_inside(cluster: Cluster, link: Link) -> bool:
    """Return whether a tier joins devices of one node only."""
    return link.degree <= cluster.devices_per_node


def median_link(links: Sequence[Link]) -> Link:
    """Return the tier of which several were measured."""
    bandwidth = median(one.bandwidth for one in links)
    reached = median(one.bandwidth * one.efficiency for one in links)
    return replace(
        links[0],
        bandwidth=bandwidth,
        efficiency=min(1.0, reached / bandwidth),
        latency_s=median(one.latency_s for one in links),
        half_bytes=median(one.half_bytes for one in links),
    )


def _median_device(devices: Sequence[Device], widest: Device) -> Device:
    tiles = Counter(one.efficiency.tile for one in devices)
    tile = min(tiles, key=lambda size: (-tiles[size], size))
    alike = [one for one in devices if one.efficiency.tile == tile]
    peaks = [
        median(one.peak_flops[place][1] for one in alike) for place in range(len(widest.peak_flops))
    ]
    bandwidth = median(one.memory_bandwidth for one in alike)

    def rate(name: str, peak: float, peak_of: Sequence[float]) -> float:
        rates = (
            getattr(one.efficiency, name) * own for one, own in zip(alike, peak_of, strict=True)
        )
        return min(1.0, median(rates) / peak)

    own_peaks = [one.peak_flops[0][1] for one in alike]
    own_bandwidths = [one.memory_bandwidth for one in alike]
    constants = {name: rate(name, peaks[0], own_peaks) for name in OF_PEAK}
    constants |= {name: rate(name, bandwidth, own_bandwidths) for name in OF_MEMORY}
    constants |= {name: median(getattr(one.efficiency, name) for one in alike) for name in PLAIN}
    return replace(
        widest,
        memory_bandwidth=bandwidth,
        peak_flops=tuple(
            (dtype, peak) for (dtype, _), peak in zip(widest.peak_flops, peaks, strict=True)
        ),
        efficiency=replace(widest.efficiency, tile=tile, **constants),
    )


def _known(clusters: Sequence[Cluster], name: str) -> list[float]:
    return [value for one in clusters for key, value in one.trainer if key == name]
