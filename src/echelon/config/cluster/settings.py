# SPDX-License-Identifier: Apache-2.0
"""Settings of the cluster -> Cluster: "laptop", COUNTxDEVICE, or a file.

A preset of clusters describes one node and the network between such nodes; a count of whole nodes,
or part of one node, makes a cluster of it; 8xH100, 8 x h100 and 8xh100 are one name
(`core/messages/names.py`), which the cluster has as 8xh100. "+NETWORK" after the name puts them on
another network, and "+4xNETWORK" gives a node four interfaces that its devices share:
1024xa100-80gb+4xhdr. Racks that join several nodes are filled evenly. A file has the same form and
says `nodes` itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from echelon.config.cluster.devices import device_table
from echelon.config.cluster.file import CLUSTER_SETTINGS, build_cluster
from echelon.config.cluster.links import network_suffixes
from echelon.config.entries import Entry, flatten
from echelon.config.presets import preset_names, read_preset, spellings
from echelon.config.reading import read_toml
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.setting_layers import entries_from_tables
from echelon.config.view import Unavailable, View
from echelon.core.cluster import Cluster
from echelon.core.errors import ConfigError, Problem, either
from echelon.core.messages.names import find_name, names_within
from echelon.core.rulebook.config import UNKNOWN_KEY, UNKNOWN_PRESET
from echelon.core.rulebook.mesh import WHOLE_NODES
from echelon.core.rules import did_you_mean

ALIASES: Mapping[str, str] = {"laptop": "8xcpu"}
DEFAULT_CLUSTER = "laptop"
RUN_TABLES = frozenset(("extends", "model", "mesh", "batch"))
"""What run files begin with, and no cluster file has."""
LOOK_ALIKE = str.maketrans("oil", "011")


_COUNT = re.compile(r"[1-9]\d{0,6}")  # devices of a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name:
    """Hold the parts of COUNTxDEVICE+INTERFACESxNETWORK.

    A device and a network that the catalogues have are called as they are there, others as they
    were written.
    """

    count: str
    device: str
    interfaces: str
    network: str

    @property
    def suffix(self) -> str:
        """Return what stands after the device."""
        many = f"{self.interfaces}x" if self.interfaces else ""
        return f"+{many}{self.network}" if self.network else ""

    @property
    def text(self) -> str:
        """Return the whole name."""
        return f"{self.count}x{self.device}{self.suffix}"


def read_cluster(view: View) -> Cluster | list[Problem]:
    """Return the cluster that the settings name, or what is wrong with it."""
    if view.has("cluster.file"):
        return read_cluster_file(view.path("cluster.file"), view.set_by("cluster.file"))
    return named_cluster(view.word("cluster.preset"), view.set_by("cluster.preset"))


def cluster_of(view: View) -> Cluster:
    """Return the cluster of settings, or of the Plan that they are; Unavailable where unknown."""
    if view.cluster is not None:
        return view.cluster
    if view.wrong.intersection(CLUSTER_SOURCES) or not any(map(view.has, CLUSTER_SOURCES)):
        raise Unavailable("cluster.preset")
    cluster = read_cluster(view)
    if isinstance(cluster, list):
        raise Unavailable("cluster.preset")
    return cluster


def typed_cluster(cluster: str, source: str) -> dict[str, Entry]:
    """Return the setting of a cluster that was typed, a name or the path of a file."""
    key = "file" if cluster.endswith(".toml") or "/" in cluster else "preset"
    return {f"cluster.{key}": Entry(value=cluster, source=source, folder=Path())}


def read_typed_cluster(cluster: str, source: str) -> Cluster:
    """Return the cluster that a typed name or path means; ConfigError where it means none."""
    ((key, entry),) = typed_cluster(cluster, source).items()
    found = (
        read_cluster_file(entry.path(), source)
        if key == "cluster.file"
        else named_cluster(cluster, source)
    )
    if isinstance(found, list):
        raise ConfigError(found)
    return found


@lru_cache(maxsize=256)  # Many rules ask for the cluster of one set of settings.
def named_cluster(name: str, set_by: str) -> Cluster | list[Problem]:
    """Return the cluster "laptop" or COUNTxDEVICE[+NETWORK], or what is wrong with the name."""
    parts = _parts(name)
    preset = read_preset("clusters", parts.device)
    if preset is None or not _COUNT.fullmatch(parts.count):
        return [_unknown(name, parts, set_by)]
    if parts.network and parts.network not in network_suffixes():
        return [_unknown_network(name, parts, set_by)]
    size, wanted = cast(int, preset.tables["devices_per_node"]), int(parts.count)
    if wanted > size and wanted % size:
        return [_cut_node(name, parts, size, set_by)]
    node = dict(preset.tables)
    called = parts.text if _alias(name) is None else name.strip().lower()
    node |= {"name": called, "devices_per_node": min(size, wanted), "nodes": -(-wanted // size)}
    node["device"] = {**device_table(preset), "sure": True}  # What others are held to.
    links = [dict(link) for link in cast("list[dict[str, Any]]", node["links"])]
    if parts.network:
        links[-1] = {"link": network_suffixes()[parts.network].key, "degree": "all"}
        if parts.interfaces and wanted > size:
            links[-1]["interfaces"] = int(parts.interfaces)
    node["links"] = [_evenly(link, size, wanted) for link in links]
    flat = dict(flatten(node, settings=CLUSTER_SETTINGS))
    return build_cluster({key: Entry(value=v, source=set_by) for key, v in flat.items()}, set_by)


def smallest_cluster(name: str, num_devices: int) -> str:
    """Return the name of the smallest cluster of the devices of `name` that has so many."""
    parts = _parts(name)
    preset = read_preset("clusters", parts.device)
    assert preset is not None, f"{name} was resolved before"
    size = cast(int, preset.tables["devices_per_node"])
    count = num_devices if num_devices <= size else -(-num_devices // size) * size
    return f"{count}x{parts.device}{parts.suffix}"


def read_cluster_file(path: Path, set_by: str) -> Cluster | list[Problem]:
    """Return the cluster that a file describes, or what is wrong with it."""
    read = read_toml(path, set_by)
    if isinstance(read, Problem):
        return [read]
    tables, lines = read
    if found := sorted(RUN_TABLES.intersection(tables)):
        problem = UNKNOWN_KEY.problem(
            f"{path} describes a run ({', '.join(found)}), not a cluster",
            key="cluster.file",
            set_by=set_by,
            suggestions=("a file as `echelon calibrate` writes it", "8xh100"),
        )
        return [problem]
    return build_cluster(entries_from_tables(tables, lines, path, CLUSTER_SETTINGS), str(path))


def _parts(name: str) -> _Name:
    whole, _, network = (_alias(name) or name).strip().partition("+")
    counted = re.fullmatch(r"(\d*)\s*[xX]?\s*(.*)", whole)
    count, device = (counted[1], counted[2]) if counted and counted[2] else ("", whole)
    shared = re.fullmatch(r"\s*([1-9]\d{0,2})\s*[xX]\s*(.+)", network)
    interfaces, network = (shared[1], shared[2]) if shared else ("", network.strip())
    preset = read_preset("clusters", device)
    known = find_name(network, {word: word for word in network_suffixes()})
    return _Name(
        count=count,
        device=device if preset is None else preset.name,
        interfaces=interfaces,
        network=network if known is None else known,
    )


def _alias(name: str) -> str | None:
    """Return the cluster that a word such as laptop stands for."""
    return ALIASES.get(name.strip().lower())


def _evenly(link: Mapping[str, Any], node: int, total: int) -> Mapping[str, Any]:
    """Return a tier of several nodes with the largest degree that divides the cluster."""
    degree = link.get("degree")
    if not isinstance(degree, int) or not node < degree < total or total % degree == 0:
        return link
    even = max(n for n in range(node, degree + 1, node) if total % n == 0)
    return {**link, "degree": even}


def _cut_node(name: str, parts: _Name, size: int, set_by: str) -> Problem:
    wanted = int(parts.count)
    whole = wanted - wanted % size
    return WHOLE_NODES.problem(
        f'cluster.preset = "{name}": a node has {size} of these devices, and {wanted} is '
        f"more than one node and not a whole number of nodes ({wanted} % {size} = "
        f"{wanted % size})",
        key="cluster.preset",
        set_by=set_by,
        suggestions=[f"{n}x{parts.device}{parts.suffix}" for n in (whole, whole + size)],
    )


def _unknown(name: str, parts: _Name, set_by: str) -> Problem:
    devices = preset_names("clusters")
    device = parts.device or name
    # Letters that look like digits are the commonest slip in names such as these.
    slip = device.lower().translate(LOOK_ALIKE)
    preset = read_preset("clusters", device) or read_preset("clusters", slip)
    whole = () if preset else names_within(device, devices)
    spelt = spellings("clusters")
    near = did_you_mean(device, spelt) or did_you_mean(slip, spelt)
    close = (preset.name,) if preset else whole or tuple(dict.fromkeys(spelt[one] for one in near))
    number = parts.count if _COUNT.fullmatch(parts.count) else "8"
    suggestions = [f"{number}x{word}" for word in close] or [f"8x{word}" for word in devices]
    suggestions += [alias for alias in ALIASES if not close or did_you_mean(name, [alias])]
    suggestions += [] if close else ["a cluster file, FILE.toml"]
    hint = f'; did you mean "{suggestions[0]}"?' if close else ""
    if len(whole) > 1:
        hint = f": {device} may be {either(whole)}"
    return UNKNOWN_PRESET.problem(
        f'cluster.preset = "{name}" is neither {" nor ".join(ALIASES)} nor COUNTxDEVICE{hint}',
        key="cluster.preset",
        set_by=set_by,
        suggestions=suggestions,
    )


def _unknown_network(name: str, parts: _Name, set_by: str) -> Problem:
    words = tuple(network_suffixes())
    close = did_you_mean(parts.network, words)
    many = f"{parts.interfaces}x" if parts.interfaces else ""
    hint = f'; did you mean "{close[0]}"?' if close else ""
    return UNKNOWN_PRESET.problem(
        f'cluster.preset = "{name}": there is no network {parts.network}{hint}',
        key="cluster.preset",
        set_by=set_by,
        suggestions=[f"{parts.count}x{parts.device}+{many}{word}" for word in close or words],
    )
