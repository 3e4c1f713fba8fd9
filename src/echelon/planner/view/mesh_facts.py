"""Where the groups of each axis lie: inside of nodes or across them, and over which link.

Ranks are placed in order: rank r is a device of node r // devices_per_node. A group uses the first
tier of links, fastest first, whose blocks of `degree` devices hold each group of its axis whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from echelon.core.axis import MESH_AXES, Axis
from echelon.core.cluster import Cluster, Link
from echelon.core.mesh import Mesh

Where = Literal["inside", "some cross", "crosses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFact:
    """Say of one axis how many groups it has, on how many nodes one is at most, and its link."""

    axis: Axis
    degree: int
    num_groups: int
    num_across: int
    most_nodes: int
    link: Link | None

    @property
    def where(self) -> Where:
        """Return whether groups stay inside of nodes."""
        if not self.num_across:
            return "inside"
        return "crosses" if self.num_across == self.num_groups else "some cross"


def axis_facts(mesh: Mesh, cluster: Cluster, *, expert_tp: int = 1) -> tuple[AxisFact, ...]:
    """Return the facts of each axis of more than one rank, innermost first."""
    return tuple(
        _fact(axis, members, cluster) for axis, members in _groups(mesh, expert_tp=expert_tp)
    )


def _groups(mesh: Mesh, *, expert_tp: int) -> Iterator[tuple[Axis, Any]]:
    """Yield each axis with its groups, one in a row: those of `Mesh.groups`, for many ranks."""
    grid = np.arange(mesh.world_size).reshape([mesh.degree(axis) for axis in MESH_AXES])
    for place in reversed(range(len(MESH_AXES))):
        axis = MESH_AXES[place]
        if mesh.degree(axis) > 1:
            yield axis, np.moveaxis(grid, place, -1).reshape(-1, mesh.degree(axis))
    if mesh.ep > 1:
        fold = mesh.expert_fold(expert_tp=expert_tp)
        if mesh.degree(*fold) % mesh.ep:
            raise ValueError(f"ep = {mesh.ep} does not divide {'x'.join(fold)}")
        order = [axis for axis in MESH_AXES if axis not in fold] + list(fold)
        moved = np.transpose(grid, [MESH_AXES.index(axis) for axis in order])
        yield Axis.EP, moved.reshape(-1, mesh.ep)


def _fact(axis: Axis, members: Any, cluster: Cluster) -> AxisFact:
    nodes = np.sort(members // cluster.devices_per_node, axis=1)
    spans = 1 + (np.diff(nodes, axis=1) > 0).sum(axis=1)
    first, last = members.min(axis=1), members.max(axis=1)
    link = next(
        (
            link
            for link in cluster.links
            if bool((first // link.degree == last // link.degree).all())
        ),
        cluster.links[-1] if cluster.links else None,
    )
    return AxisFact(
        axis=axis,
        degree=int(members.shape[1]),
        num_groups=int(members.shape[0]),
        num_across=int((spans > 1).sum()),
        most_nodes=int(spans.max()),
        link=link,
    )
