"""The device of a row by name: one of the catalogue, or of those that it does not have.

Names are matched by their words ("A100-80GB", "H100 SXM5 80GB", "NVIDIA A100-SXM4-40GB"); what a
name says beside (GB of memory, HBM2e, a limit of so many W) changes the device. One that is not
there takes the device that is nearest by name, or what was usual in its year.

`bench/data/devices.csv` has what vendors print of the others, with its source, and the pattern by
which a name is spelt, the more special of two first; rows of the kind "catalogue" are spellings of
devices that the catalogue has. Peaks are dense, of one chip; memory is in GiB, bandwidth in GB/s. A
chip of a torus sends on all of its axes both ways: its rate is that of all of them. How near to a
peak they come is assumed for their kind: arrays that multiply whole matrices, or multiprocessors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from typing import cast

from bench.accuracy.published.known_models import data_rows, data_tables
from bench.accuracy.published.rows import Refused, Row
from echelon.config.cluster.links import link_presets
from echelon.config.cluster.settings import named_cluster
from echelon.config.presets import preset_names, read_preset
from echelon.core.cluster import Cluster, Device, Efficiency, Link
from echelon.core.rulebook.config import MISSING_SETTING

MANY_NODES = 1008
"""So many nodes have every tier, and are whole racks of 18."""
SLIP, USUAL_SINCE = 0.8, 2024
"""How alike two names are of which one is a slip, and since when most runs are on H100."""
SAME_MEMORY = 0.12
"""How near the GB of a name and of a device are where both are of the same device."""
OFFERED = 0.985 * 2.0**30
"""Bytes that a driver offers of each GB of memory that a name gives."""
HBM2E = {"h100": 2400e9}
"""Bandwidth of a device that is sold with slower memory, too (torchtitan's H100, 2.4 TB/s)."""
USUAL_WATTS = {"a100-80gb": 400.0, "h100": 700.0, "h200": 700.0, "b200": 1000.0}
"""What a device draws where nothing limits it."""
FAMILIES = ("nvidia", "amd", "instinct", "tesla", "geforce")
"""Words of a name that tell no device from another."""


def cluster_of(row: Row) -> Cluster:
    """Return a cluster of a row's device: one with every tier of the catalogue's links."""
    name, key = row.word("gpu"), _device_key(row)
    cluster = other_cluster(key) if key in CHIPS else _cluster_named(key)
    return replace(cluster, device=_as_named(row, name.lower(), key, cluster.device))


def _as_named(row: Row, name: str, key: str, device: Device) -> Device:
    """Return a device with the memory and the power that its name in the row gives."""
    said = re.search(r"(\d+)\s*-?\s*g(?:i?b)\b", name)
    if said:
        has = device.memory_bytes / OFFERED
        if abs(float(said[1]) / has - 1.0) > SAME_MEMORY:
            row.say("gpu", f"{said[1]} GB", f"the name's, not the {has:.0f} GB of {device.name}")
            device = replace(device, memory_bytes=round(float(said[1]) * OFFERED))
    if "hbm2e" in name and key in HBM2E:
        device = replace(device, memory_bandwidth=HBM2E[key])
    watts = re.search(r"(\d{3,4})\s*w\b", name)
    if watts and key in USUAL_WATTS and float(watts[1]) < USUAL_WATTS[key]:
        # Power goes with the cube of a clock, as voltage goes with the clock.
        slower = (float(watts[1]) / USUAL_WATTS[key]) ** (1.0 / 3.0)
        row.say("gpu", f"{slower:.2f} of the clock", f"a limit of {watts[1]} W")
        peaks = tuple((dtype, slower * peak) for dtype, peak in device.peak_flops)
        device = replace(device, peak_flops=peaks)
    return device


def _device_key(row: Row) -> str:
    """Return the name in the catalogue, or in CHIPS, for a row's device."""
    name = row.word("gpu")
    if not name:
        raise Refused(MISSING_SETTING, "gpu is blank")
    spelt = device_spelt(name)
    if spelt in CHIPS:
        row.say("gpu", spelt, "its data sheet's peaks; how near it comes is its kind's")
    if spelt:
        return spelt
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
    unsaid = len([word for word in theirs if word not in mine and not word.endswith("gb")])
    score = 4.0 * len(models) + likeness - unsaid
    if models and memory and other:
        score += 2.0 if set(memory) & set(other) else -1.0
    elif models and memory:
        score += 0.01 * float(memory[0].removesuffix("gb"))  # Unsaid: the larger one.
    return score


def _words(name: str) -> list[str]:
    alone = re.sub(r"^\s*\d+\s*x\s*(?=[a-z])", "", name.lower())  # "8xA100": which, not how many.
    text = re.sub(r"(\d+)\s*g(?:i?b)?\b", r" \1gb ", alone)
    return [w for w in re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", text) if w not in FAMILIES]


@cache
def _cluster_named(key: str) -> Cluster:
    preset = read_preset("clusters", key)
    assert preset is not None, key
    size = cast(int, preset.tables["devices_per_node"])
    built = named_cluster(f"{MANY_NODES * size}x{key}", "the catalogue")
    assert isinstance(built, Cluster), built
    return built


EVERYWHERE = 1 << 30
HOP_S, REACHED, HALF_BYTES = 2e-6, 0.8, 4e6
"""Of links between chips of a node or a torus: seconds of a hop, share reached, half message."""
KINDS: Mapping[str, Efficiency] = {
    kind: Efficiency(**known) for kind, known in data_tables("priors.toml")["kind"].items()
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
