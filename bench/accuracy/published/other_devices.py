"""Devices that the catalogue of clusters does not have: what their vendors print.

`bench/data/devices.csv` has a row for each, with its source, and with the pattern by which its name
is spelt, the more special of two first; rows of the kind "catalogue" are spellings of devices that
the catalogue has. Peaks are dense, of one chip; memory is in GiB, bandwidth in GB/s. A chip of a
torus sends on all of its axes both ways: its rate is that of all of them. How near to a peak they
come is assumed for their kind: arrays that multiply whole matrices, or multiprocessors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from bench.accuracy.published.known_models import data_rows
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
KINDS: Mapping[str, Efficiency] = {
    "arrays": ARRAYS,
    "multiprocessors": MULTIPROCESSORS,
    "mi300a": Efficiency(
        matmul=0.51, units=228, memory=0.75, attention=0.35, attention_backward=0.25
    ),
}
ROWS: Mapping[str, Mapping[str, str]] = {row["name"]: row for row in data_rows("devices.csv")}
CHIPS = frozenset(name for name, row in ROWS.items() if row["kind"] != "catalogue")
"""Devices that the catalogue does not have."""


def device_spelt(name: str) -> str:
    """Return which row of the table a name speaks of, or ""."""
    text = re.sub(r"[\s_]+", "-", name.lower())
    return next((key for key, row in ROWS.items() if re.search(row["spelt"], text)), "")


@cache
def other_cluster(key: str) -> Cluster:
    """Return a cluster of so many of one of CHIPS that it has every tier."""
    row = ROWS[key]
    half = float(row["bf16_tflops"]) * 1e12
    peaks = [("bf16", half), ("fp16", half)]
    if "fp8_tflops" in row:
        peaks.append(("fp8", float(row["fp8_tflops"]) * 1e12))
    network = link_presets()[row["network"]]
    near = Link(
        name="links of the node",
        degree=int(row["joined"]),
        bandwidth=float(row["near_gb_per_s"]) * 1e9,
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
            memory_bytes=round(int(row["memory_gib"]) * 2.0**30),
            memory_bandwidth=float(row["memory_gb_per_s"]) * 1e9,
            peak_flops=tuple(peaks),
            efficiency=KINDS[row["kind"]],
        ),
        devices_per_node=int(row["per_node"]),
        nodes=EVERYWHERE // int(row["per_node"]),
        links=(near, far),
    )
