"""A Cluster -> the TOML file that `cluster.file` reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from echelon.config.cluster_device_units import device_doubts
from echelon.config.cluster_file import CLUSTER_SETTINGS
from echelon.config.cluster_links import known_link
from echelon.config.kinds import toml_text
from echelon.core.cluster import Cluster, Link


def cluster_toml(cluster: Cluster, about: Sequence[str] = ()) -> str:
    """Return the file of a cluster under a comment: devices, then tiers of links, fastest first."""
    return "\n".join((*(f"# {line}".rstrip() for line in about), *_lines(cluster))) + "\n"


def _lines(cluster: Cluster) -> Iterator[str]:
    pairs = {"device.peak_flops": dict(cluster.device.peak_flops), "trainer": dict(cluster.trainer)}
    tables: dict[str, list[str]] = {}
    for key, setting in CLUSTER_SETTINGS.items():
        table, _, name = key.rpartition(".")
        value = pairs[table].get(name) if table in pairs else _value(cluster, key)
        # An efficiency is written whatever it is: a default may change, what was measured not.
        if value is not None and (value != setting.default or table == "device.efficiency"):
            tables.setdefault(table, []).append(f"{name} = {_text(value)}")
    if next(device_doubts(cluster.device, cluster.backend), None) is not None:
        tables["device"].append("sure = true")
    for table, lines in tables.items():
        yield from (["", f"[{table}]"] if table else [])
        yield from lines
    for link in cluster.links:
        yield from ("", "[[links]]")
        yield from (f"{item.name} = {_text(getattr(link, item.name))}" for item in fields(Link))
        # What was measured is meant, though the catalogue has other numbers of this name.
        known = known_link(link.name)
        if known is None or link.bandwidth > known.bandwidth or link.latency_s != known.latency_s:
            yield "sure = true"


def _value(cluster: Cluster, key: str) -> object:
    value: object = cluster
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _text(value: object) -> str:
    """Return a value as TOML: read back, a number is the same one."""
    return repr(float(value)) if isinstance(value, float) else toml_text(value)
