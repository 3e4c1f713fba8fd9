"""Settings of the cluster -> Cluster: "laptop", COUNTxDEVICE, or a file.

A preset of clusters describes one node and the network between such nodes; a count of whole nodes,
or part of one node, makes a cluster of it. A file has the same form and says `nodes` itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, check_layer, flatten
from echelon.config.files import read_toml
from echelon.config.gather import entries_of
from echelon.config.kinds import Choice, Integer, Kind, Real, Text
from echelon.config.presets import preset_names, read_preset
from echelon.config.setting import COUNT, DTYPES, POSITIVE, Setting
from echelon.config.view import View
from echelon.core.cluster import Backend, Cluster, Device, Link
from echelon.core.errors import Problem
from echelon.core.rulebook.config import MISSING_SETTING, UNKNOWN_PRESET, WRONG_TYPE
from echelon.core.rulebook.mesh import LINKS_JOIN_CLUSTER, WHOLE_NODES
from echelon.core.rules import did_you_mean

ALIASES: Mapping[str, str] = {"laptop": "8xcpu"}
DEFAULT_CLUSTER = "laptop"


def _settings(kinds: Mapping[str, tuple[Kind, object]]) -> dict[str, Setting]:
    return {
        key: Setting(key=key, kind=kind, default=default, about="")
        for key, (kind, default) in kinds.items()
    }


CLUSTER_SETTINGS = _settings(
    {
        "name": (Text(), None),
        "nodes": (COUNT, 1),
        "devices_per_node": (COUNT, None),
        "backend": (Choice(options=("gloo", "nccl")), "nccl"),
        "device.name": (Text(), None),
        "device.memory_bytes": (Integer(maximum=2**60), None),
        "device.memory_bandwidth": (POSITIVE, None),
        **{f"device.peak_flops.{dtype}": (POSITIVE, "unknown") for dtype in DTYPES},
    }
)
LINK_SETTINGS = _settings(
    {
        "name": (Text(), None),
        "degree": (Integer(words=("all",)), "all"),
        "bandwidth": (POSITIVE, None),
        "latency_s": (Real(), None),
    }
)


def read_cluster(view: View) -> Cluster | list[Problem]:
    """Return the cluster that the settings name, or what is wrong with it."""
    if view.has("cluster.file"):
        return _read_file(view.path("cluster.file"), view.set_by("cluster.file"))
    return named_cluster(view.word("cluster.preset"), view.set_by("cluster.preset"))


def named_cluster(name: str, set_by: str) -> Cluster | list[Problem]:
    """Return the cluster "laptop" or COUNTxDEVICE, or what is wrong with the name."""
    count, _, device = ALIASES.get(name, name).partition("x")
    preset = read_preset("clusters", device)
    if preset is None or not re.fullmatch(r"[1-9]\d{0,6}", count):
        return [_unknown(name, count, device, set_by)]
    node = dict(preset.tables)
    size, wanted = cast(int, node["devices_per_node"]), int(count)
    if wanted > size and wanted % size:
        whole = wanted - wanted % size
        works = [f"{n}x{device}" for n in (whole, whole + size)]
        problem = WHOLE_NODES.problem(
            f'cluster.preset = "{name}": a node has {size} of these devices, and {wanted} is '
            f"more than one node and not a whole number of nodes ({wanted} % {size} = "
            f"{wanted % size})",
            key="cluster.preset",
            set_by=set_by,
            works=works,
        )
        return [problem]
    node |= {"name": name, "devices_per_node": min(size, wanted), "nodes": -(-wanted // size)}
    flat = dict(flatten(node, settings=CLUSTER_SETTINGS))
    built = _build({key: Entry(value=v, source=set_by) for key, v in flat.items()}, set_by)
    assert isinstance(built, Cluster), built
    return built


def smallest_cluster(name: str, num_devices: int) -> str:
    """Return the name of the smallest cluster of the devices of `name` that has so many."""
    device = ALIASES.get(name, name).partition("x")[2]
    preset = read_preset("clusters", device)
    assert preset is not None, f"{name} was resolved before"
    size = cast(int, preset.tables["devices_per_node"])
    count = num_devices if num_devices <= size else -(-num_devices // size) * size
    return f"{count}x{device}"


def _read_file(path: Path, set_by: str) -> Cluster | list[Problem]:
    read = read_toml(path, set_by)
    if isinstance(read, Problem):
        return [read]
    tables, lines = read
    return _build(entries_of(tables, lines, path, CLUSTER_SETTINGS), str(path))


def _build(entries: Mapping[str, Entry], where: str) -> Cluster | list[Problem]:
    links = entries.get("links")
    plain = {key: entry for key, entry in entries.items() if key != "links"}
    view, problems = _checked(plain, CLUSTER_SETTINGS, "", where)
    tiers = _tables_in(links.value) if links else []
    if tiers is None:
        message = "links is not a list of tables; write [[links]] above each"
        problems.append(WRONG_TYPE.problem(message, key="links", set_by=where))
    views: list[View] = []
    for index, tier in enumerate(tiers or []):
        source = links.source if links else where
        inner = {key: Entry(value=value, source=source) for key, value in tier.items()}
        link_view, link_problems = _checked(inner, LINK_SETTINGS, f"links[{index}].", where)
        views.append(link_view)
        problems.extend(link_problems)
    if problems:
        return problems
    return _cluster(view, views, where)


def _tables_in(value: object) -> list[dict[str, object]] | None:
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(isinstance(item, dict) for item in items):
        return None
    return cast("list[dict[str, object]]", items)


def _checked(
    entries: Mapping[str, Entry], settings: Mapping[str, Setting], prefix: str, where: str
) -> tuple[View, list[Problem]]:
    fitting, problems = check_layer(entries, settings)
    wrong = frozenset(problem.key for problem in problems)
    view = View(entries=fitting, wrong=wrong, settings=settings)
    for key in settings:
        if key not in wrong and not view.has(key):
            problems.append(
                MISSING_SETTING.problem(
                    f"{prefix}{key} is not set and has no default", key=key, set_by=where
                )
            )
    return view, problems


def _cluster(view: View, links: list[View], where: str) -> Cluster | list[Problem]:
    per_node, nodes = view.integer("devices_per_node"), view.integer("nodes")
    total = per_node * nodes
    tiers: list[Link] = []
    for link in links:
        degree = link.entry("degree").value
        joined = total if degree == "all" else min(cast(int, degree), total)
        if joined <= (tiers[-1].degree if tiers else 1):
            continue  # On one node the network joins nobody, on one device no link does.
        tiers.append(
            Link(
                name=link.word("name"),
                degree=joined,
                bandwidth=link.number("bandwidth"),
                latency_s=link.number("latency_s"),
            )
        )
    reach = tiers[-1].degree if tiers else 1
    if reach < total:
        problem = LINKS_JOIN_CLUSTER.problem(
            f"{where}: the links join {reach} devices, but the cluster has {nodes} x {per_node} = "
            f"{total}",
            key="links",
            set_by=where,
            works=('degree = "all" in the last [[links]]',),
        )
        return [problem]
    peaks = [(dtype, f"device.peak_flops.{dtype}") for dtype in DTYPES]
    device = Device(
        name=view.word("device.name"),
        memory_bytes=view.integer("device.memory_bytes"),
        memory_bandwidth=view.number("device.memory_bandwidth"),
        peak_flops=tuple((d, view.number(key)) for d, key in peaks if not view.is_default(key)),
    )
    return Cluster(
        name=view.word("name"),
        device=device,
        devices_per_node=per_node,
        nodes=nodes,
        links=tuple(tiers),
        backend=cast(Backend, view.word("backend")),
    )


def _unknown(name: str, count: str, device: str, set_by: str) -> Problem:
    devices = preset_names("clusters")
    close = did_you_mean(device or name, devices)
    number = count if count.isdigit() and int(count) else "8"
    works = [f"{number}x{word}" for word in close] or [f"8x{word}" for word in devices]
    works += [alias for alias in ALIASES if not close or did_you_mean(name, [alias])]
    hint = f'; did you mean "{works[0]}"?' if close else ""
    return UNKNOWN_PRESET.problem(
        f'cluster.preset = "{name}" is neither {" nor ".join(ALIASES)} nor COUNTxDEVICE{hint}',
        key="cluster.preset",
        set_by=set_by,
        works=works,
    )
