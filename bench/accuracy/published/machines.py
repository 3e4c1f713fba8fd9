"""The machine of a row: its device in the row's precision, and the tiers of its links."""

from __future__ import annotations

import re
from dataclasses import replace

from bench.accuracy.published.devices import cluster_of
from bench.accuracy.published.links import WITHOUT_NETWORK, device_link, network_of
from bench.accuracy.published.programs import FULL_PRECISION
from bench.accuracy.published.rows import Row
from echelon.core.cluster import Cluster, Device, Link
from echelon.cost.inputs.numbers import MachineNumbers, TierNumbers
from echelon.cost.seconds.from_plan import machine_numbers_from_cluster

FP4_OVER_FP8 = {"b200": 2.0, "gb200": 2.0, "b300": 3.0, "gb300": 3.0}
"""The dense peak of products in 4 bits over that in 8, as vendors print them."""
LARGEST_NODE = 16
"""Devices of the largest node; links that join more join a rack of them."""
EVERYWHERE = 1e9
"""The degree of a network: it joins any number of devices."""


def machine_of(row: Row) -> MachineNumbers:
    """Return the device and links of a row."""
    cluster = _with_full_precision(row, cluster_of(row))
    per_node = row.count("gpus_per_node")
    if per_node is None:
        per_node = row.assume(
            "gpus_per_node", float(cluster.devices_per_node), "the catalogue's node"
        )
    near = _near(row, cluster, per_node)
    far = _far(row, cluster, per_node)
    dtype, attention = _dtypes(row, cluster.device)
    machine = machine_numbers_from_cluster(cluster, dtype, attention_dtype=attention)
    return replace(machine, node=near.degree, tiers=(near, far))


def _dtypes(row: Row, device: Device) -> tuple[str, str]:
    """Return the dtypes in which a row's products and its attention are computed."""
    text = row.word("precision").lower()
    whole = FULL_PRECISION.match(text) is not None
    known = [dtype for dtype in ("bf16", "fp16") if device.flops(dtype)]
    if not known:
        row.say("precision", "nominal", f"no bf16 peak of {device.name} is known")
    half = known[0] if known else "bf16"
    if whole:
        return "fp32", "fp32"
    narrow = re.search(r"fp\s*-?([84])|\b(?:int8|e4m3|e5m2)", text)
    if not narrow:
        return half, half
    dtypes = ("fp4", "fp8") if narrow[1] == "4" else ("fp8",)
    dtype = next((one for one in dtypes if device.flops(one)), half)
    if dtype != dtypes[0]:
        row.say("precision", dtype, f"no {dtypes[0]} peak of {device.name} is known")
    return dtype, half


def _with_full_precision(row: Row, cluster: Cluster) -> Cluster:
    """Return a cluster whose fp32 peak is that of tf32 products, where the row uses these.

    Tensor cores since the A100 do tf32 at half the rate of bf16. Containers for training make it
    what "fp32" means, so that a run in fp32 is one in tf32 where the device has it.
    """
    text, device = row.word("precision").lower(), cluster.device
    peaks = dict(device.peak_flops)
    half = peaks.get("bf16")
    if FULL_PRECISION.match(text) and half and "plain" not in text and "ieee" not in text:
        peaks["fp32"] = half / 2.0
        row.say("precision", "tf32", "half of the rate of bf16; what fp32 is by default")
    elif FULL_PRECISION.match(text) and "fp32" not in peaks:
        peaks["fp32"] = (half or peaks.get("fp16", 0.0)) / 16.0
        row.say("precision", "fp32", "a sixteenth of the rate of bf16")
    kind = cluster.name.rpartition("x")[2]
    if "fp4" in text and "fp4" not in peaks and kind in FP4_OVER_FP8:
        peaks["fp4"] = FP4_OVER_FP8[kind] * peaks["fp8"]
    return replace(cluster, device=replace(device, peak_flops=tuple(peaks.items())))


def _near(row: Row, cluster: Cluster, per_node: float) -> TierNumbers:
    text, link = row.word("intra_link"), cluster.links[0]
    kind, rate = device_link(text, link.bandwidth) if text else (None, None)
    degree = max(per_node, _domain(text) or _domain(row.word("gpu")) or 0.0)
    if link.degree > LARGEST_NODE:
        degree = max(degree, float(link.degree))
    if not text:
        row.say("intra_link", link.name, "the catalogue's node")
    elif kind is None and rate is None:
        row.say("intra_link", link.name, f'"{text}" names no link of the catalogue')
    if kind is None:
        return _tier(link, degree, rate)
    return TierNumbers(
        degree=degree,
        bandwidth=rate or kind.bandwidth,
        latency_s=kind.latency_s,
        efficiency=kind.efficiency,
        half_bytes=kind.half_bytes,
    )


def _domain(text: str) -> float | None:
    found = re.search(r"NVL[\s-]*(\d+)(?![\d\s]*\s*G)", text)
    return float(found[1]) if found else None


def _far(row: Row, cluster: Cluster, per_node: float) -> TierNumbers:
    text, link = row.word("inter_link"), cluster.links[-1]
    if any(word in text.lower() for word in WITHOUT_NETWORK):
        return _tier(link, EVERYWHERE, None)
    found = network_of(text, per_node) if text else None
    if found is None:
        crosses = (row.positive("n_gpus") or 0.0) > per_node
        if crosses:
            why = f'"{text}" names no network' if text else "the catalogue's network"
            row.say("inter_link", link.name, why)
        return _tier(link, EVERYWHERE, None)
    if found.guess:
        row.say("inter_link", f"{found.bandwidth / 1e9:g} GB/s a device", found.guess)
    kind = found.kind
    return TierNumbers(
        degree=EVERYWHERE,
        bandwidth=found.bandwidth,
        latency_s=kind.latency_s if kind else link.latency_s,
        efficiency=kind.efficiency if kind else link.efficiency,
        half_bytes=kind.half_bytes if kind else link.half_bytes,
    )


def _tier(link: Link, degree: float, rate: float | None) -> TierNumbers:
    return TierNumbers(
        degree=degree,
        bandwidth=rate or link.bandwidth,
        latency_s=link.latency_s,
        efficiency=link.efficiency,
        half_bytes=link.half_bytes,
    )
