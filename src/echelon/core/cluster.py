"""What a run runs on: devices, how many to a node, and the links between them.

Bandwidths are bytes per second in one direction; vendors' bidirectional and bit figures are
converted where a preset is written, with its source, never later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Give what one device can do: dense peak FLOP/s by dtype, memory and its bandwidth."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...] = ()

    def flops(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for `dtype`, or None where it is not known."""
        return dict(self.peak_flops).get(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Give one tier of links: how many devices it joins, bytes/s per device each way, seconds."""

    name: str
    degree: int
    bandwidth: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Describe a cluster: `nodes` x `devices_per_node` devices, and the links, fastest first."""

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    links: tuple[Link, ...]
    backend: Backend = "nccl"

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all nodes."""
        return self.nodes * self.devices_per_node
