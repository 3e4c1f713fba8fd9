"""Links of a cluster file: bandwidths that look like bits, or like the sum of both directions.

A latency far from what the link of this name has is questioned too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from echelon.config.cluster_device_units import SECONDS, device_doubts, read_as
from echelon.config.cluster_devices import known_device
from echelon.config.cluster_links import BYTES_PER_S, LinkKind, known_link, link_kinds
from echelon.config.kinds import toml_text
from echelon.config.view import View
from echelon.core.cluster import Backend, Device
from echelon.core.errors import Problem
from echelon.core.rulebook.cluster import CLUSTER_UNITS, LINK_BANDWIDTH_IN_BITS

MARGIN = 1.25
"""How far above the rate of its name a bandwidth may be before it is questioned."""
LEAST = 1e5
"""Bytes per second below which no link that trains is: a rate in Gb/s or GB/s as it is printed."""
FAR = 100.0
"""How far from the latency of its name one may be before it is questioned."""
SHORTEST_S, LONGEST_S = 1e-8, 0.1
"""Seconds between which every latency is: light goes 3 m in the one, around half the earth in the
other."""
NO_GENERATION = ("nvlink", "nvlinkandnvswitch", "nvswitch", "nvlinknvswitch")
"""Names of links, squeezed, that are known as soon as the device is."""


def device_problems(device: Device, backend: Backend, where: str) -> list[Problem]:
    """Return a problem for each number of a device that looks like another unit."""
    return [
        CLUSTER_UNITS.problem(
            f"{doubt.key} = {_number(device, doubt.key)} of {toml_text(device.name)}: {doubt.why}",
            key=doubt.key,
            set_by=where,
            works=[*doubt.works, "sure = true in [device]"],
        )
        for doubt in device_doubts(device, backend)
    ]


def unit_problems(
    links: Sequence[View],
    degrees: Sequence[int | None],
    per_node: int,
    where: str,
    device: str = "",
) -> list[Problem]:
    """Return a problem for each link whose numbers are far from what its name can carry."""
    problems: list[Problem] = []
    for index, link in enumerate(links):
        if link.flag("sure"):
            continue
        problems += _latency_problems(link, index, where)
        degree = degrees[index]
        beyond = degree is not None and degree > per_node
        found = _questioned(link, per_node, device, network=beyond)
        if found is None:
            continue
        why, works = found
        bandwidth = link.number("bandwidth")
        problems.append(
            LINK_BANDWIDTH_IN_BITS.problem(
                f"links[{index}].bandwidth = {bandwidth:g} of {toml_text(link.word('name'))} is "
                f"{bandwidth / 1e9:g} GB/s of each device each way, {why}",
                key="links",
                set_by=where,
                works=[*(f"bandwidth = {_plain(one)}" for one in works), "sure = true"],
            )
        )
    return problems


def _latency_problems(link: View, index: int, where: str) -> list[Problem]:
    """Return the problem of a latency in another unit; 0, which is none at all, is meant."""
    name, latency = link.word("name"), link.number("latency_s")
    known = known_link(name)
    low, high = SHORTEST_S, LONGEST_S
    if known is not None and known.kind != "memory":
        low, high = known.latency_s / FAR, known.latency_s * FAR
        beside = f"{known.name} has {known.latency_s:g} s"
    else:
        beside = f"every latency is between {low:g} and {high:g} s"
    if latency == 0 or low <= latency <= high:
        return []
    meant = read_as(latency, SECONDS, (max(low, 1e-7), min(high, 1e-2)))
    why = "" if meant is None else f"; it looks like {meant[0]}"
    works = [] if meant is None else [f"latency_s = {meant[1]:g}"]
    return [
        CLUSTER_UNITS.problem(
            f"links[{index}].latency_s = {latency:g} of {toml_text(name)}: {beside}{why}",
            key="links",
            set_by=where,
            works=[*works, "sure = true"],
        )
    ]


def _link_of(name: str, device: str) -> LinkKind | None:
    """Return the link that a name speaks of; of "NVLink" alone, that of the device."""
    known = known_link(name)
    if known is not None or re.sub(r"[^a-z]", "", name.lower()) not in NO_GENERATION:
        return known
    preset = known_device(device, 0)
    if preset is None:
        return None
    links = cast("list[dict[str, object]]", preset.tables["links"])
    found = link_kinds()[str(links[0]["link"])]
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
            own = "it" if known_link(name) is not None else f"that of {device}"
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


def _fastest_interface() -> LinkKind:
    networks = [link for link in link_kinds().values() if link.kind == "network"]
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
