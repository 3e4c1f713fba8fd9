"""Devices that the catalogue of clusters does not have: what their vendors print.

Peaks are dense, of one chip; memory is in GiB, bandwidth in GB/s. A chip of a torus sends on all of
its axes both ways: its rate is that of all of them. How near to a peak they come is assumed for
their kind: arrays that multiply whole matrices, or multiprocessors. Sources: the data sheets of the
vendors; of TPUs Google Cloud's pages on each, and "How to Scale Your Model" (2025), part 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from echelon.config.cluster.links import link_presets
from echelon.core.cluster import Cluster, Device, Efficiency, Link

ARRAYS = Efficiency(
    matmul=0.9, half_depth=128.0, units=8, memory=0.85, attention=0.55, attention_backward=0.45
)
MULTIPROCESSORS = Efficiency(
    matmul=0.72, half_depth=300.0, units=108, memory=0.82, attention=0.5, attention_backward=0.4
)
EVERYWHERE = 1 << 30
HOP_S, REACHED, HALF_BYTES = 2e-6, 0.8, 4e6
"""Of links between chips of a node or a torus: seconds of a hop, share reached, half message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Give one device, what its node or torus joins, and the network that is usual for it."""

    spelt: str
    bf16: float
    gib: float
    gb_per_s: float
    node: int = 8
    joined: int = 8
    near_gb_per_s: float = 25.0
    network: str = "infiniband-hdr"
    fp8: float = 0.0
    efficiency: Efficiency = MULTIPROCESSORS


def _tpu(spelt: str, peak: float, memory: tuple[float, float], pod: tuple[int, float]) -> Chip:
    gib, gb_per_s = memory
    joined, near = pod
    return Chip(
        spelt=spelt,
        bf16=peak,
        gib=gib,
        gb_per_s=gb_per_s,
        node=4,
        joined=joined,
        near_gb_per_s=near,
        network="ethernet-100",
        efficiency=ARRAYS,
    )


def _card(spelt: str, peak: float, gib: float, gb_per_s: float, *, fp8: float = 0.0) -> Chip:
    """Return a card on PCIe 4, whose nodes share a slower network."""
    return Chip(spelt=spelt, bf16=peak, gib=gib, gb_per_s=gb_per_s, network="ethernet-100", fp8=fp8)


CHIPS: Mapping[str, Chip] = {
    "tpu-v4": _tpu(r"tpu-?v?4", 275, (32, 1228), (4096, 270)),
    "tpu-v5e": _tpu(r"v5-?e|v5-?lite", 197, (16, 819), (256, 180)),
    "tpu-v6e": _tpu(r"tpu-?v?6|trillium", 918, (32, 1640), (256, 360)),
    "tpu-7x": _tpu(r"tpu-?v?7|ironwood", 2307, (192, 7380), (9216, 1080)),
    "trainium1": Chip(
        spelt=r"trainium|trn1",
        bf16=190,
        gib=32,
        gb_per_s=820,
        node=16,
        joined=16,
        near_gb_per_s=192,
        network="efa-100",
        efficiency=ARRAYS,
    ),
    "gaudi3": Chip(
        spelt=r"gaudi-?3",
        bf16=1835,
        fp8=1835,
        gib=128,
        gb_per_s=3700,
        near_gb_per_s=525,
        network="roce-400",
        efficiency=ARRAYS,
    ),
    "gaudi2": Chip(
        spelt=r"gaudi",
        bf16=432,
        fp8=865,
        gib=96,
        gb_per_s=2450,
        near_gb_per_s=262,
        network="roce-200",
        efficiency=ARRAYS,
    ),
    "mi300a": Chip(
        spelt=r"mi-?300-?a",
        bf16=980,
        fp8=1961,
        gib=128,
        gb_per_s=5300,
        node=4,
        joined=4,
        near_gb_per_s=384,
        network="slingshot-11",
        efficiency=Efficiency(
            matmul=0.51, units=228, memory=0.75, attention=0.35, attention_backward=0.25
        ),
    ),
    "ascend-910c": Chip(
        spelt=r"910-?c", bf16=752, gib=128, gb_per_s=3200, near_gb_per_s=350, network="roce-400"
    ),
    "ascend-910b": Chip(spelt=r"910-?b|ascend", bf16=376, gib=64, gb_per_s=1600, near_gb_per_s=196),
    "a10": _card(r"\ba-?10\b", 125, 24, 600),
    "a30": _card(r"\ba-?30\b", 165, 24, 933),
    "a40": _card(r"\ba-?40\b", 150, 48, 696),
    "l40": _card(r"\bl-?40\b", 181, 48, 864),
    # Workstation and GeForce cards: peaks with fp32 sums, of NVIDIA's architecture papers.
    "rtx4070-ti-super": _card(r"4070-?ti-?s", 88, 16, 672, fp8=176),
    "rtx4070": _card(r"4070", 58, 12, 504, fp8=117),
    "rtx4080": _card(r"4080", 97, 16, 717, fp8=195),
    "rtx4060-ti": _card(r"4060", 44, 16, 288, fp8=88),
    "rtx5060-ti": _card(r"5060", 47, 16, 448, fp8=95),
    "rtx5070-ti": _card(r"5070", 88, 16, 896, fp8=176),
    "rtx5080": _card(r"5080", 113, 16, 960, fp8=225),
    "rtx3080": _card(r"3080", 60, 10, 760),
    "rtx3090-ti": _card(r"3090-?ti", 80, 24, 1008),
    "a4000": _card(r"\ba-?4000", 77, 16, 448),
    "a4500": _card(r"\ba-?4500", 95, 20, 640),
    "a5000": _card(r"\ba-?5000", 111, 24, 768),
    "rtx2000-ada": _card(r"2000-?ada", 48, 16, 224, fp8=96),
    "rtx4000-ada": _card(r"4000-?(?:sff-?)?ada", 107, 20, 360, fp8=214),
    "rtx5000-ada": _card(r"5000-?ada", 261, 32, 576, fp8=522),
    "h100-nvl": _card(r"h100-?nvl", 835, 94, 3938, fp8=1671),
    "p100": _card(r"\bp-?100\b", 21, 16, 732),
}
"""Chips by name, and how their names are spelt; the more special of two spellings first."""

PRESETS: Mapping[str, str] = {
    "tpu-v5p": r"v5-?p\b|tpu-?v?5(?!-?[el])",
    "trainium2": r"trainium-?2|trn2",
    "gh200": r"gh-?200|grace-?hopper",
    "a10g": r"\ba-?10g\b",
    "a6000": r"\ba-?6000\b",
    "rtx6000-ada": r"6000-?ada|ada-?6000",
    "rtx-pro-6000": r"pro-?6000",
    "l4": r"\bl-?4\b",
    "t4": r"\bt-?4\b",
    "rtx5090": r"5090",
    "rtx4090": r"4090",
    "rtx3090": r"3090(?!-?ti)",
}
"""Devices of the catalogue that share words with others of it, and how their names are spelt."""


def device_spelt(name: str) -> str:
    """Return which of PRESETS or CHIPS a name speaks of, or ""."""
    text = re.sub(r"[\s_]+", "-", name.lower())
    spelt = {**PRESETS, **{key: chip.spelt for key, chip in CHIPS.items()}}
    return next((key for key, pattern in spelt.items() if re.search(pattern, text)), "")


@cache
def other_cluster(key: str) -> Cluster:
    """Return a cluster of so many of one of CHIPS that it has every tier."""
    chip = CHIPS[key]
    half = chip.bf16 * 1e12
    peaks = [("bf16", half), ("fp16", half)] + ([("fp8", chip.fp8 * 1e12)] if chip.fp8 else [])
    network = link_presets()[chip.network]
    near = Link(
        name="links of the node",
        degree=chip.joined,
        bandwidth=chip.near_gb_per_s * 1e9,
        latency_s=HOP_S,
        efficiency=REACHED,
        half_bytes=HALF_BYTES,
    )
    far = Link(
        name=network.name,
        degree=EVERYWHERE,
        bandwidth=network.bandwidth,
        latency_s=network.latency_s,
        efficiency=network.efficiency,
        half_bytes=network.half_bytes,
    )
    return Cluster(
        name=key,
        device=Device(
            name=key,
            memory_bytes=round(chip.gib * 2.0**30),
            memory_bandwidth=chip.gb_per_s * 1e9,
            peak_flops=tuple(peaks),
            efficiency=chip.efficiency,
        ),
        devices_per_node=chip.node,
        nodes=EVERYWHERE // chip.node,
        links=(near, far),
    )
