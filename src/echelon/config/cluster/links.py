# SPDX-License-Identifier: Apache-2.0
"""Links of a cluster: the catalogue `presets/links.toml`, and checks of tiers.

The catalogue has rates as vendors print them: a value with a unit (Gb/s or GB/s), a direction and a
source. This file is the only place that turns bits into bytes, and the sum of both directions into
one. A bandwidth may look like bits, or like the sum of both directions; a latency far from what the
link of this name has is questioned too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, cast

from echelon.config.cluster.devices import (
    SECONDS,
    changed_efficiencies,
    device_preset_from_name,
    likely_unit,
    suspect_device_numbers,
)
from echelon.config.view import View
from echelon.core.cluster import Backend, Device
from echelon.core.errors import Problem
from echelon.core.rulebook.cluster import (
    CLUSTER_UNITS,
    INTERFACES_BETWEEN_NODES,
    LINK_BANDWIDTH_IN_BITS,
    MEASURED_OR_EFFICIENCY,
    TIERS_DIVIDE_CLUSTER,
)
from echelon.core.rulebook.mesh import LINKS_JOIN_CLUSTER
from echelon.core.rules import nearest_divisors
from echelon.core.settings.value_types import toml_text

BYTES_PER_S: Mapping[str, float] = {"Gb/s": 1e9 / 8, "GB/s": 1e9}
DIRECTIONS: Mapping[str, float] = {"each way": 1.0, "both ways": 0.5}
UNITS: Mapping[str, float] = {"us": 1e-6, "share": 1.0, "MB": 1e6}
LINK_CLASSES = ("device", "host", "network", "memory")
MEASURES: Mapping[str, str] = {"latency": "us", "efficiency": "share", "half_message": "MB"}
"""The numbers of a link beside its rates, and the unit in which the catalogue has each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Give one number that a vendor prints: value, unit, direction, and who says so."""

    value: float
    unit: str
    direction: str
    source: str

    @property
    def bytes_each_way(self) -> float:
        """Return the rate in bytes per second in one direction."""
        return self.value * BYTES_PER_S[self.unit] * DIRECTIONS[self.direction]

    def __str__(self) -> str:
        """Return the rate as it is printed: ``400 Gb/s each way``."""
        return f"{self.value:g} {self.unit} {self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPreset:
    """Give one link of the catalogue."""

    key: str
    """Its key in the catalogue."""
    name: str
    """What it is called in reports."""
    kind: str
    """device (between devices of a node), host (PCIe), network (between nodes) or memory."""
    rates: tuple[Rate, ...]
    """What sources say of its bandwidth; they agree."""
    latency_s: float
    """Seconds of one message."""
    efficiency: float
    """Part of the bandwidth that long messages reach."""
    half_bytes: float
    """Bytes of a message that reaches half of that."""
    words: tuple[str, ...]
    """Words that name it as the network of a cluster (16xa100-80gb+hdr)."""
    known_as: tuple[str, ...]
    """Names that files give it."""

    @property
    def bandwidth(self) -> float:
        """Return bytes per second in one direction."""
        return self.rates[0].bytes_each_way

    def arithmetic(self) -> str:
        """Return how the printed rate becomes bytes each way: ``400 Gb/s = 50 GB/s``."""
        # Bits tell most to whoever mixed up the units, then the sum of both directions.
        printed = sorted(self.rates, key=lambda r: (r.unit != "Gb/s", r.direction != "both ways"))
        return f"{printed[0]} = {self.bandwidth / 1e9:g} GB/s each way"


@cache
def link_presets() -> Mapping[str, LinkPreset]:
    """Return the links of the catalogue by key."""
    text = (files("echelon.config.presets") / "links.toml").read_text("utf-8")
    return {key: read_link(key, table) for key, table in tomllib.loads(text).items()}


def network_suffixes() -> Mapping[str, LinkPreset]:
    """Return the links that a cluster's name can end in (16xa100-80gb+hdr), by word."""
    return {word: link for link in link_presets().values() for word in link.words}


def link_preset_from_name(name: str) -> LinkPreset | None:
    """Return the link that a name speaks of: ``NDR``, ``IB HDR 200Gb/s``, ``NVLink gen 4``."""
    squeezed, words = _squeeze(name), set(re.findall(r"[a-z0-9-]+", name.lower()))
    found: list[tuple[int, LinkPreset]] = []
    for link in link_presets().values():
        spelt = (link.name, link.key, *link.known_as)
        fits = [len(_squeeze(one)) for one in spelt if _squeeze(one) in squeezed]
        fits += [len(_squeeze(word)) for word in link.words if word in words]
        found += [(max(fits), link)] if fits else []
    return max(found, key=lambda pair: pair[0])[1] if found else None


def read_link(key: str, table: Mapping[str, Any]) -> LinkPreset:
    """Return one entry; ValueError where a number lacks its unit, direction or source."""
    faults = list(_entry_faults(key, table))
    if faults:
        raise ValueError("; ".join(faults))
    numbers = {name: table[name]["value"] * UNITS[unit] for name, unit in MEASURES.items()}
    return LinkPreset(
        key=key,
        name=table["name"],
        kind=table["kind"],
        rates=tuple(Rate(**rate) for rate in table["rates"]),
        latency_s=numbers["latency"],
        efficiency=numbers["efficiency"],
        half_bytes=numbers["half_message"],
        words=tuple(table.get("words", ())),
        known_as=tuple(table.get("known_as", ())),
    )


def _entry_faults(key: str, table: Mapping[str, Any]) -> Iterator[str]:
    unknown = set(table) - {"name", "kind", "rates", "words", "known_as", *MEASURES}
    if unknown:
        yield f"{key} has {', '.join(sorted(unknown))}, which nothing reads"
    if table.get("kind") not in LINK_CLASSES:
        yield f"{key} is of no kind ({', '.join(LINK_CLASSES)})"
    if not table.get("name") or not table.get("rates"):
        yield f"{key} has no name or no rates"
    for rate in cast("list[Mapping[str, Any]]", table.get("rates", [])):
        yield from _number_faults(f"{key}.rates", rate, tuple(BYTES_PER_S))
        if rate.get("direction") not in DIRECTIONS:
            yield f"{key}.rates: {rate.get('value')} is {' or '.join(DIRECTIONS)}, but which?"
    for name, unit in MEASURES.items():
        yield from _number_faults(f"{key}.{name}", table.get(name, {}), (unit,))


def _number_faults(where: str, number: Mapping[str, Any], units: tuple[str, ...]) -> Iterator[str]:
    value = number.get("value")
    if not isinstance(value, int | float) or value < 0:
        yield f"{where} has no value"
    if number.get("unit") not in units:
        yield f"{where}: {value} is in no unit ({', '.join(units)})"
    if not str(number.get("source", "")).strip():
        yield f"{where}: {value} has no source"


@lru_cache(maxsize=1024)
def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


MARGIN = 1.25
"""How far above the rate of its name a bandwidth may be before it is questioned."""
LEAST = 1e5
"""Bytes per second below which no link that trains is: a rate in Gb/s or GB/s as it is printed."""
FAR = 100.0
"""How far from the latency of its name one may be before it is questioned."""
SHORTEST_S = 1e-8
LONGEST_S = 0.1
"""Seconds between which every latency is: light goes 3 m in the one, around half the earth in the
other."""
NO_GENERATION = ("nvlink", "nvlinkandnvswitch", "nvswitch", "nvlinknvswitch")
"""Names of links, squeezed, that are known as soon as the device is."""


def device_problems(device: Device, backend: Backend, where: str) -> Iterator[Problem]:
    """Yield a problem for each number of a device that looks like another unit."""
    for key, why, suggestions in suspect_device_numbers(device, backend):
        yield CLUSTER_UNITS.problem(
            f"{key} = {_number(device, key)} of {toml_text(device.name)}: {why}",
            key=key,
            set_by=where,
            suggestions=[*suggestions, "sure = true in [device]"],
        )


def efficiency_problems(device: Device, given: Collection[str], where: str) -> Iterator[Problem]:
    """Yield that efficiencies were changed where measured kernels stand in their place."""
    for name, usual in changed_efficiencies(device, given).items():
        ways = (
            'measured = "none" in [device], or no such line',
            f"{name} = {usual:g}, which is for other trainers",
        )
        yield MEASURED_OR_EFFICIENCY.problem(
            f"device.efficiency.{name} = {getattr(device.efficiency, name):g}, but "
            f'device.measured = "{device.measured}" predicts our trainer in its place',
            key=f"device.efficiency.{name}",
            set_by=where,
            suggestions=ways,
        )


def unit_problems(
    links: Sequence[View],
    degrees: Sequence[int | None],
    per_node: int,
    where: str,
    device: str = "",
) -> Iterator[Problem]:
    """Yield a problem for each link whose numbers are far from what its name can carry."""
    for index, link in enumerate(links):
        if link.flag("sure"):
            continue
        yield from _latency_problems(link, index, where)
        degree = degrees[index]
        beyond = degree is not None and degree > per_node
        found = _questioned(link, per_node, device, network=beyond)
        if found is None:
            continue
        why, works = found
        bandwidth = link.number("bandwidth")
        yield LINK_BANDWIDTH_IN_BITS.problem(
            f"links[{index}].bandwidth = {bandwidth:g} of {toml_text(link.word('name'))} is "
            f"{bandwidth / 1e9:g} GB/s of each device each way, {why}",
            key="links",
            set_by=where,
            suggestions=[*(f"bandwidth = {_plain(one)}" for one in works), "sure = true"],
        )


def _latency_problems(link: View, index: int, where: str) -> Iterator[Problem]:
    """Yield the problem of a latency in another unit; 0, which is none at all, is meant."""
    name, latency = link.word("name"), link.number("latency_s")
    known = link_preset_from_name(name)
    low, high = SHORTEST_S, LONGEST_S
    if known is not None and known.kind != "memory":
        low, high = known.latency_s / FAR, known.latency_s * FAR
        beside = f"{known.name} has {known.latency_s:g} s"
    else:
        beside = f"every latency is between {low:g} and {high:g} s"
    if latency == 0 or low <= latency <= high:
        return
    meant = likely_unit(latency, SECONDS, (max(low, 1e-7), min(high, 1e-2)))
    why = "" if meant is None else f"; it looks like {meant[0]}"
    suggestions = [] if meant is None else [f"latency_s = {meant[1]:g}"]
    yield CLUSTER_UNITS.problem(
        f"links[{index}].latency_s = {latency:g} of {toml_text(name)}: {beside}{why}",
        key="links",
        set_by=where,
        suggestions=[*suggestions, "sure = true"],
    )


def _link_of(name: str, device: str) -> LinkPreset | None:
    """Return the link that a name speaks of; of "NVLink" alone, that of the device."""
    known = link_preset_from_name(name)
    if known is not None or re.sub(r"[^a-z]", "", name.lower()) not in NO_GENERATION:
        return known
    preset = device_preset_from_name(device, 0)
    if preset is None:
        return None
    links = cast("list[dict[str, object]]", preset.tables["links"])
    found = link_presets()[str(links[0]["link"])]
    return found if "nvlink" in found.key else None


def _questioned(
    link: View, per_node: int, device: str, *, network: bool
) -> tuple[str, list[float]] | None:
    """Return why a bandwidth is questioned and what it may have meant."""
    name, bandwidth = link.word("name"), link.number("bandwidth")
    known = _link_of(name, device)
    # Interfaces that a device has more than one of add up.
    several = max(1.0, link.integer("interfaces") / per_node)
    if bandwidth < LEAST:
        gigabits = bandwidth * BYTES_PER_S["Gb/s"]
        return "and bandwidths are bytes per second", [known.bandwidth if known else gigabits]
    if known is not None and known.kind == "memory":
        return None  # It carries what this machine's memory does; the catalogue's is one such.
    if known is not None:
        if bandwidth > MARGIN * several * known.bandwidth:
            own = "it" if link_preset_from_name(name) is not None else f"that of {device}"
            return f"but {own} carries {known.arithmetic()}", [several * known.bandwidth]
        return None
    if (printed := _printed(name)) is not None and bandwidth > MARGIN * several * printed[1]:
        return f"but {printed[0]} = {printed[1] / 1e9:g} GB/s", [several * printed[1]]
    fastest = _fastest_interface()
    if network and bandwidth > MARGIN * several * fastest.bandwidth:
        return (
            f"but the fastest interface into a network carries {fastest.arithmetic()}",
            [bandwidth / 8, fastest.bandwidth],
        )
    return None


def _printed(name: str) -> tuple[str, float] | None:
    """Return the rate that stands in a name, as it stands and in bytes/s: ``400 Gb/s``."""
    match = re.search(r"(\d+(?:\.\d+)?)\s*(G[Bb]/s|G[Bb]ps|Gbit/s)", name)
    if match is None:
        return None
    unit = "GB/s" if match[2].startswith("GB") else "Gb/s"
    return f"{match[1]} {unit}", float(match[1]) * BYTES_PER_S[unit]


def _fastest_interface() -> LinkPreset:
    networks = [link for link in link_presets().values() if link.kind == "network"]
    return max(networks, key=lambda link: link.bandwidth)


def _number(device: Device, key: str) -> str:
    """Return a number of a device as a file has it."""
    _, field, *inner = key.split(".")
    if field == "peak_flops":
        return f"{device.flops(inner[0]):g}".replace("e+", "e")
    value = device.efficiency.launch_s if inner else getattr(device, field)
    return (
        f"{value:,}".replace(",", "_")
        if isinstance(value, int)
        else f"{value:g}".replace("e+", "e")
    )


def _plain(number: float) -> str:
    """Return a bandwidth as it is written in files: ``50e9``."""
    return f"{number / 1e9:g}e9"


ALL = "all"


def link_degrees(links: Sequence[View], total: int) -> list[int | None]:
    """Return how many devices each tier joins; None for one that joins none beyond the last.

    On one node the network joins nobody, on one device no link does.
    """
    found: list[int | None] = []
    reach = 1
    for link in links:
        degree = link.entry("degree").value
        joined = total if degree == ALL else min(cast(int, degree), total)
        found.append(joined if joined > reach else None)
        reach = max(reach, joined)
    return found


def tier_problems(
    links: Sequence[View], degrees: Sequence[int | None], cluster: View, where: str
) -> Iterator[Problem]:
    """Yield what is wrong with the tiers of a cluster."""
    per_node, nodes = cluster.integer("devices_per_node"), cluster.integer("nodes")
    total, joined = per_node * nodes, [degree for degree in degrees if degree is not None]
    reach = joined[-1] if joined else 1
    if not links and total > 1:
        yield _no_links(cluster, where)
        return
    if reach < total:
        yield LINKS_JOIN_CLUSTER.problem(
            f"{where}: the links join {reach} devices, but the cluster has {nodes} x "
            f"{per_node} = {total}",
            key="links",
            set_by=where,
            suggestions=('degree = "all" in the last [[links]]',),
        )
        return
    for degree, beyond in pairwise(joined):
        yield from _tier(degree, beyond, per_node, where)
    for link, degree in zip(links, degrees, strict=True):
        if link.integer("interfaces") and degree is not None and degree <= per_node:
            yield INTERFACES_BETWEEN_NODES.problem(
                f'interfaces = {link.integer("interfaces")} of "{link.word("name")}", which '
                f"joins {degree} devices of a node of {per_node}",
                key="links",
                set_by=where,
                suggestions=("interfaces in the [[links]] that joins nodes",),
            )


def _no_links(cluster: View, where: str) -> Problem:
    """Return the problem of several devices without links, with tiers such as theirs often are."""
    per_node, nodes = cluster.integer("devices_per_node"), cluster.integer("nodes")
    device = cluster.word("device.name")
    preset = device_preset_from_name(device, cluster.integer("device.memory_bytes"))
    usual = [] if preset is None else cast("list[Mapping[str, object]]", preset.tables["links"])
    cpu = cluster.word("backend") == "gloo"
    inside = "loopback" if cpu else str(usual[0]["link"]) if usual else "nvlink-4"
    beyond = "ethernet-10" if cpu else str(usual[-1]["link"]) if usual else "infiniband-ndr"
    tiers = [f'{{ link = "{inside}", degree = {per_node} }}'] if per_node > 1 else []
    tiers += [f'{{ link = "{beyond}", degree = "all" }}'] if nodes > 1 else []
    return LINKS_JOIN_CLUSTER.problem(
        f"{where}: {nodes} x {per_node} = {nodes * per_node} devices and no links; each tier is a "
        "[[links]] table with the name of a link (echelon explain units) or its own numbers, the "
        "fastest first",
        key="links",
        set_by=where,
        suggestions=(f"links = [{', '.join(tiers)}] above [device]",),
    )


def _tier(degree: int, beyond: int, per_node: int, where: str) -> Iterator[Problem]:
    """Yield the problem of a tier that does not divide the next one, or cuts nodes."""
    if beyond % degree:
        whole = f"the next tier joins {beyond}"
        shown = f"{beyond} % {degree} = {beyond % degree}"
        suggestions = [str(n) for n in nearest_divisors(beyond, degree) if 1 < n < beyond]
    elif degree % per_node and per_node % degree:
        whole = f"a node has {per_node}"
        shown = f"neither {degree} % {per_node} nor {per_node} % {degree} is 0"
        multiples = [n for n in range(per_node, beyond, per_node) if beyond % n == 0]
        fits = sorted({*nearest_divisors(per_node, degree), *multiples} - {1})
        suggestions = [str(n) for n in fits if beyond % n == 0][:4]
    else:
        return
    yield TIERS_DIVIDE_CLUSTER.problem(
        f"{where}: a tier joins {degree} devices and {whole} ({shown})",
        key="links",
        set_by=where,
        suggestions=[f"degree = {number}" for number in suggestions],
    )
