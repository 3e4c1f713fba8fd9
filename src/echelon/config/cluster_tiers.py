"""Tiers of links of a cluster file: which devices each joins, and whether they fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from echelon.config.cluster_devices import known_device
from echelon.config.view import View
from echelon.core.errors import Problem
from echelon.core.rulebook.cluster import INTERFACES_BETWEEN_NODES, TIERS_DIVIDE_CLUSTER
from echelon.core.rulebook.mesh import LINKS_JOIN_CLUSTER
from echelon.core.rules import nearest_divisors

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
) -> list[Problem]:
    """Return what is wrong with the tiers of a cluster."""
    per_node, nodes = cluster.integer("devices_per_node"), cluster.integer("nodes")
    total, joined = per_node * nodes, [degree for degree in degrees if degree is not None]
    reach = joined[-1] if joined else 1
    problems: list[Problem] = []
    if not links and total > 1:
        return [_no_links(cluster, where)]
    if reach < total:
        problems.append(
            LINKS_JOIN_CLUSTER.problem(
                f"{where}: the links join {reach} devices, but the cluster has {nodes} x "
                f"{per_node} = {total}",
                key="links",
                set_by=where,
                works=('degree = "all" in the last [[links]]',),
            )
        )
        return problems
    for index, degree in enumerate(joined[:-1]):
        problems += _tier(degree, joined[index + 1], per_node, where)
    for link, degree in zip(links, degrees, strict=True):
        if link.integer("interfaces") and degree is not None and degree <= per_node:
            problems.append(
                INTERFACES_BETWEEN_NODES.problem(
                    f'interfaces = {link.integer("interfaces")} of "{link.word("name")}", which '
                    f"joins {degree} devices of a node of {per_node}",
                    key="links",
                    set_by=where,
                    works=("interfaces in the [[links]] that joins nodes",),
                )
            )
    return problems


def _no_links(cluster: View, where: str) -> Problem:
    """Return the problem of several devices without links, with tiers such as theirs often are."""
    per_node, nodes = cluster.integer("devices_per_node"), cluster.integer("nodes")
    device = cluster.word("device.name")
    preset = known_device(device, cluster.integer("device.memory_bytes"))
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
        works=(f"links = [{', '.join(tiers)}] above [device]",),
    )


def _tier(degree: int, beyond: int, per_node: int, where: str) -> list[Problem]:
    """Return the problem of a tier that does not divide the next one, or cuts nodes."""
    if beyond % degree:
        part, whole = degree, f"the next tier joins {beyond}"
        shown = f"{beyond} % {degree} = {beyond % degree}"
        works = [str(n) for n in nearest_divisors(beyond, degree) if 1 < n < beyond]
    elif degree % per_node and per_node % degree:
        part, whole = degree, f"a node has {per_node}"
        shown = f"neither {degree} % {per_node} nor {per_node} % {degree} is 0"
        multiples = [n for n in range(per_node, beyond, per_node) if beyond % n == 0]
        fits = sorted({*nearest_divisors(per_node, degree), *multiples} - {1})
        works = [str(n) for n in fits if beyond % n == 0][:4]
    else:
        return []
    problem = TIERS_DIVIDE_CLUSTER.problem(
        f"{where}: a tier joins {part} devices and {whole} ({shown})",
        key="links",
        set_by=where,
        works=[f"degree = {number}" for number in works],
    )
    return [problem]
