"""What a run runs on: devices, how many to a node, and the links between them.

Bandwidths are bytes per second in one direction; vendors' bidirectional and bit figures are
converted where a preset is written, with its source, never later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Backend = Literal["gloo", "nccl"]

TRAINER_CONSTANTS = (
    "host_s",
    "width_bytes",
    "inner_bytes",
    "logit_bytes",
    "optimizer_bytes",
    "step_s",
    "own_hops",
    "pair_hops",
    "adding_bytes",
)
"""Fields of `cost.lattice.software.Software` that `echelon calibrate` finds by steps of plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Say how near to its peaks a device comes: typical of its kind, or measured.

    A product of m x k by k x n takes `tile` x `tile` of its result on each of `units` (streaming
    multiprocessors, cores) at a time, and reaches `matmul` of the peak when k is large, half of
    that at k = `half_depth`. Operators that move bytes reach `memory` of the memory's bandwidth,
    fused attention `attention` of the peak forward and `attention_backward` backward. The update
    of parameters, which reads and writes every state once, reaches `optimizer` of the memory's
    bandwidth. A kernel takes `launch_s` to start, on the device or on the host that feeds it.
    """

    matmul: float = 0.8
    half_depth: float = 64.0
    tile: int = 128
    units: int = 1
    memory: float = 0.8
    attention: float = 0.5
    attention_backward: float = 0.4
    launch_s: float = 5e-6
    aligned: float = 0.95
    optimizer: float = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Give what one device can do: dense peak FLOP/s by dtype, memory and its bandwidth.

    Ranks on the processors of one machine share `cores` of them: where more of a node's ranks
    compute at once, each gets its share of a core (0: every device computes by itself).
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...] = ()
    efficiency: Efficiency = field(default_factory=Efficiency)
    cores: float = 0.0

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
    TRAINER_CONSTANTS; those that are not there are the usual ones.
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
