"""The machine of a row: its device in the row's precision, and the tiers of its links.

Links are bytes/s of one device, each way, and interfaces of a node. A number is of the node
("1600Gb/s per node", "4x100Gb/s per node"), of one device ("400Gb/s per GPU"), or of one interface
("8x HDR IB 200Gb/s"). "b" are bits, "B" bytes. A link inside of a node is printed as the sum of
both ways: NVLink's 600 GB/s are 300 each way.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from bench.accuracy.published.devices import cluster_of
from bench.accuracy.published.programs import FULL_PRECISION
from bench.accuracy.published.rows import Row
from echelon.config.cluster.links import LinkPreset, link_preset_from_name
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


_RATE = re.compile(
    r"(\d+(?:\.\d+)?)\s*(T|G|M)(?:b(?:it)?s?\s*/\s*s(?:ec)?|bps|(B(?:yte)?s?\s*/\s*s(?:ec)?|Bps))"
)
_SHORT = re.compile(r"(\d+)\s*G(?:bE|BE|E|b)?\b")
_TIMES = re.compile(r"(\d+)\s*(?:x|X|\*)\s*(?=[\dA-Za-z(])")
_SCALE = {"T": 1e12, "G": 1e9, "M": 1e6}
WITHOUT_NETWORK = ("single node", "single-node", "none", "1 node")
"""What stands in the place of a network where there is none."""
NODE_ABOVE = 120e9
"""A network rate above this, of nothing named, is a node's and not an interface's (960 Gb/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Give what one device gets of the network: bytes/s each way; interfaces where counted."""

    bandwidth: float
    interfaces: float
    kind: LinkPreset | None
    guess: str = ""


def network_of(text: str, per_node: float) -> Network | None:
    """Return the network between nodes of `per_node` devices, or None where the text names none."""
    bare = re.sub(r"\([^)]*\)", " ", text)
    kind = network_kind(text)
    for part in (bare, text):
        rate = rate_of(part)
        if rate is not None:
            return _network(part, rate, kind, per_node)
    if kind is None:
        return None
    times = _TIMES.search(bare)
    if times:
        count = float(times[1])
        return Network(bandwidth=kind.bandwidth * count / per_node, interfaces=count, kind=kind)
    return Network(
        bandwidth=kind.bandwidth, interfaces=0.0, kind=kind, guess="an interface for each device"
    )


def _network(text: str, rate: float, kind: LinkPreset | None, per_node: float) -> Network:
    times = _TIMES.search(text)
    count = float(times[1]) if times else 0.0
    if re.search(r"per[\s-]*(gpu|device|rank|accelerator|card)|/\s*gpu", text, re.IGNORECASE):
        return Network(bandwidth=rate, interfaces=count, kind=kind)
    if count:
        return Network(bandwidth=count * rate / per_node, interfaces=count, kind=kind)
    if re.search(r"per[\s-]*(node|host|server)|/\s*node|node-node", text, re.IGNORECASE):
        return Network(bandwidth=rate / per_node, interfaces=0.0, kind=kind)
    if rate > NODE_ABOVE:
        guess = "so much is a node's"
        return Network(bandwidth=rate / per_node, interfaces=0.0, kind=kind, guess=guess)
    if kind is not None and kind.key.startswith("ethernet"):
        guess = "one interface a node"
        return Network(bandwidth=rate / per_node, interfaces=1.0, kind=kind, guess=guess)
    guess = "an interface for each device"
    return Network(bandwidth=rate, interfaces=per_node, kind=kind, guess=guess)


def rate_of(text: str) -> float | None:
    """Return the first rate in a text in bytes/s: ``200Gb/s``, ``50 GB/s``; None where it is 0."""
    found = _RATE.search(text)
    if found:
        value = float(found[1]) * _SCALE[found[2]]
        return (value if found[3] else value / 8.0) or None
    short = _SHORT.search(text)
    return float(short[1]) * 1e9 / 8.0 or None if short else None


def network_kind(text: str) -> LinkPreset | None:
    """Return the link of the catalogue that a network's text speaks of."""
    kind = link_preset_from_name(text)
    if kind is not None and kind.kind == "network":
        return kind
    for word in ("XDR", "NDR", "HDR100", "HDR", "EDR", "Omni-Path", "Slingshot"):
        if word.lower() in text.lower():
            return link_preset_from_name(f"InfiniBand {word}") or link_preset_from_name(word)
    rate = rate_of(text)
    lower = text.lower()
    family = next((w for w in ("roce", "efa", "ethernet") if w in lower), "")
    if rate is not None and family:
        per = rate * 8e-9 if rate <= NODE_ABOVE else 200.0
        return link_preset_from_name(f"{family} {per:g}")
    return None


def device_link(text: str, usual: float) -> tuple[LinkPreset | None, float | None]:
    """Return the link between devices of a node that a text names, and a rate each way.

    A printed rate is one way or both, whichever is nearer to what the link has, or to the `usual`
    bytes/s of such a node.
    """
    kind = link_preset_from_name(re.sub(r"(?i)gen\s*", "", text))
    if kind is not None and kind.kind == "network":
        kind = None
    if kind is None and "pcie" in text.lower():
        kind = link_preset_from_name("PCIe 4")
    rate = rate_of(text)
    if rate is None:
        return kind, None
    wanted = kind.bandwidth if kind else usual
    return kind, min((rate, rate / 2.0), key=lambda one: abs(math.log(one / wanted)))
