# SPDX-License-Identifier: Apache-2.0
"""The groups of the controls' mesh, and the links that they travel over: compiled for the page.

The same as `planner/view/mesh_map.py` says of a Plan, without an array of ranks: of a group the
first and the last rank tell which nodes it is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from echelon.page.explorer.controls import Controls, Record
from echelon.planner.view.document import MeshAxis, MeshDigit


def mesh_axes(controls: Controls, cluster: Record) -> list[MeshAxis]:
    """Return the axes of more than one rank, outermost first; neighbours share out experts."""
    found: list[MeshAxis] = []
    stride = controls.workers
    for name, degree in (
        ("pp", controls.pp),
        ("dp_replicate", controls.dp_replicate),
        ("dp_shard", controls.dp_shard),
        ("cp", controls.cp),
        ("tp", controls.tp),
    ):
        stride = stride // degree
        if degree > 1:
            found.append(_axis(name, degree, stride, controls.workers, cluster))
    if controls.ep > 1:
        # Ranks that hold pieces of one expert are neighbours.
        pieces = controls.tp if controls.expert_tp > 1 else 1
        found.append(_axis("ep", controls.ep, pieces, controls.workers, cluster))
    return found


def _axis(name: str, degree: int, stride: int, ranks: int, cluster: Record) -> MeshAxis:
    links: Sequence[Any] = cluster["links"]
    told = "no link"
    for link in links:
        told = f"{link['name']}, {link['words']}"
        if num_across(degree, stride, ranks, link["degree"]) == 0:
            break
    across = num_across(degree, stride, ranks, cluster["devices_per_node"])
    where = "crosses" if across == ranks // degree else "some cross"
    return MeshAxis(
        name=name,
        degree=degree,
        digits=(MeshDigit(degree=degree, stride=stride),),
        link=told,
        where="in a node" if across == 0 else where,
    )


def num_across(degree: int, stride: int, ranks: int, block: int) -> int:
    """Return how many groups are not in one block of so many devices.

    Of a group the first and the last rank tell. Groups are runs of `stride` neighbours that begin
    every ``degree x stride`` ranks: where in a block they begin repeats.
    """
    span, last = degree * stride, stride * (degree - 1)
    if last >= block:
        return ranks // degree
    every = lcm(span, block)
    whole = ranks // every
    found = _across(span, stride, last, ranks % every, block)
    return found + whole * _across(span, stride, last, every, block) if whole else found


def _across(span: int, stride: int, last: int, ranks: int, block: int) -> int:
    """Return how many groups of the first so many ranks lie across blocks."""
    found = 0
    for start in range(0, ranks, span):
        for first in range(start, start + stride):
            if first % block + last >= block:
                found = found + 1
    return found
