"""The numbers of a machine: a Cluster in one dtype as the formulas of the lattice read it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from echelon.core.cluster import Cluster, Efficiency, Link
from echelon.core.topology import crowded, shared_bandwidth
from echelon.cost.lattice.numbers import MachineNumbers, TierNumbers
from echelon.cost.unit_times import NOMINAL_FLOPS_PER_BYTE

ALONE = Link(name="none", degree=1, bandwidth=1e12, latency_s=0.0)
"""The tier of a single device, which talks to nobody."""


def machine_numbers(
    cluster: Cluster,
    dtype: str = "bf16",
    *,
    attention_dtype: str | None = None,
    ranks: int | None = None,
) -> MachineNumbers:
    """Return the numbers of a cluster whose devices compute in `dtype`, each with its share.

    Attention may be done in another one: in "bf16" where products are in "fp8". Where a peak is
    not known, it is a nominal rate for each byte of the memory's bandwidth. Where devices share
    cores, `ranks` of a node compute at once, by default on all of its devices; where they share the
    interfaces of a node, all of them send at once.
    """
    computing = min(ranks or cluster.devices_per_node, cluster.devices_per_node)
    share = cluster.device.share(computing)
    cluster = crowded(cluster, computing)
    device = cluster.device
    how_near: dict[str, Any] = {
        item.name: float(getattr(device.efficiency, item.name))
        for item in fields(Efficiency)
        if item.name in _FIELDS
    }
    return MachineNumbers(
        peak_flops=peak_flops(cluster, dtype),
        attention_flops=peak_flops(cluster, attention_dtype or dtype),
        memory_bytes=float(device.memory_bytes),
        memory_bandwidth=float(device.memory_bandwidth),
        node=float(cluster.devices_per_node),
        tiers=tuple(_tier(cluster, link) for link in cluster.links or (ALONE,)),
        share=share,
        **how_near,
    )


_FIELDS = frozenset(item.name for item in fields(MachineNumbers))


def peak_flops(cluster: Cluster, dtype: str) -> float:
    """Return the dense peak of a device of `cluster` in FLOP/s, nominal where it is not known."""
    device = cluster.device
    return device.flops(dtype) or NOMINAL_FLOPS_PER_BYTE * device.memory_bandwidth


def _tier(cluster: Cluster, link: Link) -> TierNumbers:
    return TierNumbers(
        degree=float(link.degree),
        bandwidth=float(shared_bandwidth(cluster, link)),
        latency_s=float(link.latency_s),
        efficiency=float(link.efficiency),
        half_bytes=float(link.half_bytes),
    )
