"""Bandwidths of a cluster file that look like bits, or like the sum of both directions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from echelon.config.cluster_links import BYTES_PER_S, LinkKind, known_link, link_kinds
from echelon.config.kinds import toml_text
from echelon.config.view import View
from echelon.core.errors import Problem
from echelon.core.rulebook.cluster import LINK_BANDWIDTH_IN_BITS

MARGIN = 1.25
"""How far above the rate of its name a bandwidth may be before it is questioned."""
LEAST = 1e5
"""Bytes per second below which no link that trains is: a rate in Gb/s or GB/s as it is printed."""


def unit_problems(
    links: Sequence[View], degrees: Sequence[int | None], per_node: int, where: str
) -> list[Problem]:
    """Return a problem for each link whose bandwidth is far from what its name can carry."""
    problems: list[Problem] = []
    for index, link in enumerate(links):
        if link.flag("sure"):
            continue
        degree = degrees[index]
        beyond = degree is not None and degree > per_node
        found = _questioned(link, per_node, network=beyond)
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


def _questioned(link: View, per_node: int, *, network: bool) -> tuple[str, list[float]] | None:
    """Return why a bandwidth is questioned and what it may have meant."""
    name, bandwidth = link.word("name"), link.number("bandwidth")
    known = known_link(name)
    # Interfaces that a device has more than one of add up.
    several = max(1.0, link.integer("interfaces") / per_node)
    if bandwidth < LEAST:
        gigabits = bandwidth * BYTES_PER_S["Gb/s"]
        return "and bandwidths are bytes per second", [known.bandwidth if known else gigabits]
    if known is not None and known.kind == "memory":
        return None  # It carries what this machine's memory does; the catalogue's is one such.
    if known is not None:
        if bandwidth > MARGIN * several * known.bandwidth:
            return f"but it carries {known.arithmetic()}", [several * known.bandwidth]
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


def _plain(number: float) -> str:
    """Return a bandwidth as it is written in files: ``50e9``."""
    return f"{number / 1e9:g}e9"
