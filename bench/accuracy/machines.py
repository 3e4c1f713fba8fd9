"""The machine of a row: its device by name, and the tiers of its links.

Names are matched by their words to the catalogue of clusters ("A100-80GB", "H100 SXM5 80GB",
"NVIDIA A100-SXM4-40GB"); one that is not there takes the device that is nearest by name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from typing import cast

from bench.accuracy.links import WITHOUT_NETWORK, device_link, network_of
from bench.accuracy.refusals import Refused
from bench.accuracy.rows import Row
from echelon.config.cluster import named_cluster
from echelon.config.presets import preset_names, read_preset
from echelon.core.cluster import Cluster, Device, Link
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.cost.lattice.numbers import MachineNumbers, TierNumbers
from echelon.cost.lattice.of_cluster import machine_numbers

MANY_NODES = 1008
"""So many nodes have every tier, and are whole racks of 18."""
LARGEST_NODE = 16
"""Devices of the largest node; links that join more join a rack of them."""
SLIP, USUAL_SINCE = 0.8, 2024
"""How alike two names are of which one is a slip, and since when most runs are on H100."""
EVERYWHERE = 1e9
"""The degree of a network: it joins any number of devices."""


def machine_of(row: Row) -> MachineNumbers:
    """Return the device and links of a row."""
    cluster = _cluster_named(_device_key(row))
    per_node = row.count("gpus_per_node")
    if per_node is None:
        per_node = row.assume(
            "gpus_per_node", float(cluster.devices_per_node), "the catalogue's node"
        )
    near = _near(row, cluster, per_node)
    far = _far(row, cluster, per_node)
    dtype, attention = _dtypes(row, cluster.device)
    machine = machine_numbers(cluster, dtype, attention_dtype=attention)
    return replace(machine, node=near.degree, tiers=(near, far))


def _dtypes(row: Row, device: Device) -> tuple[str, str]:
    """Return the dtypes in which a row's products and its attention are computed."""
    text = row.word("precision").lower()
    words = ("tf32", "fp32") if re.match("fp32|tf32|float32", text) else ("bf16", "fp16")
    known = [dtype for dtype in words if device.flops(dtype)]
    if not known:
        row.say("precision", "nominal", f"no {words[0]} peak of {device.name} is known")
    half = known[0] if known else words[0]
    wanted = re.search(r"(fp[84])", text)
    if not wanted:
        return half, half
    for dtype in ("fp4", "fp8") if wanted[1] == "fp4" else ("fp8",):
        if device.flops(dtype):
            break
    else:
        dtype = half
    if dtype != wanted[1]:
        row.say("precision", dtype, f"no {wanted[1]} peak of {device.name} is known")
    return dtype, half


def _device_key(row: Row) -> str:
    """Return the catalogue's name for a row's device."""
    name = row.word("gpu")
    if not name:
        raise Refused(MISSING_SETTING, "gpu is blank")
    keys = [key for key in preset_names("clusters") if not key.startswith("cpu")]
    best = max(keys, key=lambda key: _likeness(name, key))
    if set(_words(best)) & set(_words(name)):
        return best
    mine, theirs = ([w for w in _words(n) if not w.endswith("gb")] for n in (name, best))
    if SequenceMatcher(None, "".join(mine), "".join(theirs)).ratio() < SLIP:
        year = row.number("year") or float(USUAL_SINCE)
        best = "h100" if year >= USUAL_SINCE else "a100-80gb"
        row.say("gpu", best, f'"{name}" is not in the catalogue; this is usual in its year')
        return best
    row.say("gpu", best, f'"{name}" is not in the catalogue; this is nearest by name')
    return best


def _likeness(name: str, key: str) -> float:
    mine, theirs = _words(name), _words(key)
    shared = [word for word in theirs if word in mine]
    models = [word for word in shared if not word.endswith("gb")]
    memory = [word for word in theirs if word.endswith("gb")]
    other = [word for word in mine if word.endswith("gb")]
    likeness = SequenceMatcher(None, "".join(mine), "".join(theirs)).ratio()
    score = 4.0 * len(models) + likeness
    if models and memory and other:
        score += 2.0 if set(memory) & set(other) else -1.0
    elif models and memory:
        score += 0.01 * float(memory[0].removesuffix("gb"))  # Unsaid: the larger one.
    return score


def _words(name: str) -> list[str]:
    text = re.sub(r"(\d+)\s*g(?:i?b)?\b", r" \1gb ", name.lower())
    return [w for w in re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", text) if w not in ("nvidia", "amd")]


@cache
def _cluster_named(key: str) -> Cluster:
    preset = read_preset("clusters", key)
    assert preset is not None, key
    size = cast(int, preset.tables["devices_per_node"])
    built = named_cluster(f"{MANY_NODES * size}x{key}", "the catalogue")
    assert isinstance(built, Cluster), built
    return built


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
    found = re.search(r"NVL\s*(\d+)", text)
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
        interfaces=found.interfaces,
    )


def _tier(link: Link, degree: float, rate: float | None) -> TierNumbers:
    return TierNumbers(
        degree=degree,
        bandwidth=rate or link.bandwidth,
        latency_s=link.latency_s,
        efficiency=link.efficiency,
        half_bytes=link.half_bytes,
        interfaces=float(link.interfaces),
    )
