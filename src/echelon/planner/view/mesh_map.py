# SPDX-License-Identifier: Apache-2.0
"""The mesh map: which device of which node is which rank, and what each axis travels over.

    +-----+-----+
    | 0   | 1   |    a box is a device: its rank, then its coordinates
    | pp0 | pp0 |
    | tp0 | tp1 |
    +-----+-----+

Of many nodes one is drawn in full, and of the others it is said which ranks they hold.

Ranks are placed in order: rank r is a device of node r // devices_per_node. A group uses the first
tier of links, fastest first, whose blocks of `degree` devices hold each group of its axis whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.core.axis import Axis
from echelon.core.cluster import Cluster, Link
from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.planner.view.document import DataTable, MeshAxis, MeshDigit, MeshFigure, Section

_MOST_NODES = 4  # nodes
MOST_DEVICES = 72  # devices
_MOST_PARTS = 16  # names


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
    def where(self) -> str:
        """Return whether groups stay inside of nodes, in words."""
        if not self.num_across:
            return "in a node"
        return "crosses" if self.num_across == self.num_groups else "some cross"


def axis_facts(mesh: Mesh, cluster: Cluster, *, expert_tp: int = 1) -> tuple[AxisFact, ...]:
    """Return the facts of each axis of more than one rank, innermost first."""
    return tuple(
        _fact(axis, members, cluster) for axis, members in _groups(mesh, expert_tp=expert_tp)
    )


def _groups(mesh: Mesh, *, expert_tp: int) -> Iterator[tuple[Axis, Any]]:
    """Yield each axis with its groups, one in a row: those of `Mesh.groups`, for many ranks."""
    grid = np.arange(mesh.num_workers).reshape([mesh.degree(axis) for axis in mesh.order])
    for place in reversed(range(len(mesh.order))):
        axis = mesh.order[place]
        if mesh.degree(axis) > 1:
            yield axis, np.moveaxis(grid, place, -1).reshape(-1, mesh.degree(axis))
    if mesh.ep > 1:
        fold = mesh.expert_fold(expert_tp=expert_tp)
        if mesh.degree(*fold) % mesh.ep:
            raise ValueError(f"ep = {mesh.ep} does not divide {'x'.join(fold)}")
        order = [axis for axis in mesh.order if axis not in fold] + list(fold)
        moved = np.transpose(grid, [mesh.order.index(axis) for axis in order])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MapDevice:
    """Hold one device of the map: its rank, and its coordinates as they are told."""

    rank: int
    coordinates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshMap:
    """Hold a mesh on a cluster, and what is to be said of its axes."""

    mesh: Mesh
    cluster: Cluster
    facts: tuple[AxisFact, ...]
    expert_tp: int

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes that hold ranks."""
        return -(-self.mesh.world_size // self.cluster.devices_per_node)

    @property
    def shown_nodes(self) -> range:
        """Return the nodes that are drawn: all of a few, else the first."""
        return range(self.num_nodes if self.num_nodes <= _MOST_NODES else 1)

    def devices(self, node: int) -> tuple[MapDevice, ...]:
        """Return the devices of a node that are drawn."""
        first = node * self.cluster.devices_per_node
        stop = min(first + self.cluster.devices_per_node, self.mesh.world_size)
        return tuple(self._device(rank) for rank in range(first, min(stop, first + MOST_DEVICES)))

    def node_title(self, node: int) -> str:
        """Return what is said of a drawn node: its number, and what of it is not drawn."""
        per_node = self.cluster.devices_per_node
        here = min(per_node, self.mesh.world_size - node * per_node)
        title = f"node {node}"
        if here > MOST_DEVICES:
            title += f", the first {MOST_DEVICES} of its {here:,} ranks"
        if here < per_node:
            title += f", {per_node - here:,} of its {per_node:,} devices without a rank"
        return title

    def parts(self) -> tuple[str, ...]:
        """Return, of each pipeline rank, the nodes that hold it; nothing where all are drawn."""
        if len(self.shown_nodes) == self.num_nodes:
            return ()
        names = [self._part(pp) for pp in range(self.mesh.pp)]
        if len(names) > _MOST_PARTS:
            left = len(names) - _MOST_PARTS + 1
            return (*names[: _MOST_PARTS - 2], f"{left:,} more, as many nodes each", names[-1])
        return tuple(names)

    def head(self) -> tuple[str, str]:
        """Return what the cluster and the mesh are, each in a line."""
        cluster, mesh = self.cluster, self.mesh
        used = [fact for fact in reversed(self.facts) if fact.axis is not Axis.EP]
        degrees = " x ".join(f"{fact.axis} {fact.degree}" for fact in used)
        experts = f", ep {mesh.ep}" if mesh.ep > 1 else ""
        ranks = f"{mesh.num_workers:,} ranks" if mesh.num_workers > 1 else "1 rank"
        beside = f", and {mesh.servers:,} server{'s' * (mesh.servers > 1)}" if mesh.servers else ""
        return (
            f"{cluster.name}: {cluster.nodes:,} x {cluster.devices_per_node:,} "
            f"{cluster.device.name}",
            f"{degrees} = {ranks}{experts}{beside}" if degrees else f"{ranks}{beside}",
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the axes as a table, its head first."""
        head = ("axis", "degree", "groups", "each is", "nodes", "each way", "link")
        return [head, *(_row(fact) for fact in self.facts)]

    def shared_ways(self) -> tuple[str, ...]:
        """Return which devices share their way into a network."""
        per_node = self.cluster.devices_per_node
        links = {fact.link for fact in self.facts if fact.link and fact.num_across}
        return tuple(
            f"{link.name}: the {per_node:,} devices of a node share {link.interfaces:,} "
            f"interface{'s' * (link.interfaces > 1)}"
            for link in self.cluster.links
            if link in links and 0 < link.interfaces < per_node
        )

    def _device(self, rank: int) -> MapDevice:
        mesh = self.mesh
        if mesh.is_server(rank):
            return MapDevice(rank=rank, coordinates=("server",))
        here = mesh.coordinates(rank)
        both = mesh.dp_replicate > 1 and mesh.dp_shard > 1
        told = [(Axis.PP, "pp"), (Axis.DP_REPLICATE, "rep" if both else "dp")]
        told += [(Axis.DP_SHARD, "shard" if both else "dp"), (Axis.CP, "cp"), (Axis.TP, "tp")]
        names = [f"{name}{here[axis]}" for axis, name in told if mesh.degree(axis) > 1]
        if mesh.ep > 1:
            names.append(f"ep{mesh.expert_index(rank, expert_tp=self.expert_tp)}")
        return MapDevice(rank=rank, coordinates=tuple(names))

    def _part(self, pp: int) -> str:
        per_node, size = self.cluster.devices_per_node, self.mesh.num_workers // self.mesh.pp
        first, last = pp * size // per_node, ((pp + 1) * size - 1) // per_node
        nodes = f"node {first:,}" if first == last else f"nodes {first:,}-{last:,}"
        return f"pp{pp}: {nodes}, {size:,} ranks"


def mesh_map(mesh: Mesh, cluster: Cluster, *, expert_tp: int = 1) -> MeshMap:
    """Return the map of a mesh on a cluster; `expert_tp` says how `ep` is folded over it."""
    facts = axis_facts(mesh, cluster, expert_tp=expert_tp)
    return MeshMap(mesh=mesh, cluster=cluster, facts=facts, expert_tp=expert_tp)


def _row(fact: AxisFact) -> tuple[str, ...]:
    link = fact.link
    return (
        fact.axis.value,
        f"{fact.degree:,}",
        f"{fact.num_groups:,}",
        fact.where,
        f"{fact.most_nodes:,}",
        f"{decimal_bytes(link.bandwidth)}/s" if link else "-",
        link.name if link else "-",
    )


def mesh_section(plan: Plan) -> Section:
    """Return the part of the page that says where ranks are and what their groups travel over."""
    found = mesh_map(plan.mesh, plan.cluster, expert_tp=plan.layout.experts.expert_tp)
    cluster, mesh = found.head()
    head, *rows = found.rows()
    return Section(
        id="mesh",
        title="Where ranks are",
        summary=f"{mesh}, on {cluster}. Choose a rank to see its groups.",
        figure=mesh_figure(found),
        table=DataTable(head=head, rows=tuple(rows), right=(1, 2, 4, 5)),
        notes=found.shared_ways(),
    )


def mesh_figure(found: MeshMap) -> MeshFigure:
    """Return the ranks of a mesh on their devices, with the links of each axis."""
    mesh, cluster = found.mesh, found.cluster
    return MeshFigure(
        cluster=cluster.name,
        device=cluster.device.name,
        ranks=mesh.num_workers,
        devices_per_node=cluster.devices_per_node,
        axes=tuple(_axis(mesh, fact, found.expert_tp) for fact in reversed(found.facts)),
        words=(*found.parts(), *_servers(mesh)),
    )


def _servers(mesh: Mesh) -> tuple[str, ...]:
    """Return which ranks are beside the grid, if any."""
    if not mesh.servers:
        return ()
    first, last = mesh.server_ranks[0], mesh.server_ranks[-1]
    ranks = (
        f"rank {first:,} is a server" if first == last else f"ranks {first:,}-{last:,} are servers"
    )
    return (f"{ranks}, beside these ranks",)


def _axis(mesh: Mesh, fact: AxisFact, expert_tp: int) -> MeshAxis:
    link = fact.link
    told = f"{link.name}, {decimal_bytes(link.bandwidth)}/s each way" if link else "no link"
    return MeshAxis(
        name=fact.axis.value,
        degree=fact.degree,
        digits=_digits(mesh, fact.axis, expert_tp),
        link=told,
        where=fact.where,
    )


def _digits(mesh: Mesh, axis: Axis, expert_tp: int) -> tuple[MeshDigit, ...]:
    """Return the digits that an axis varies.

    Those of `ep` are neighbours of its fold, whose axes stand beside one another in a rank's
    number: the groups are runs of as many, whatever axes they reach over.
    """
    degree, inner = mesh.degree(axis), axis
    if axis is Axis.EP:
        degree, inner = mesh.ep, mesh.expert_fold(expert_tp=expert_tp)[-1]
    return (MeshDigit(degree=degree, stride=_stride(mesh, inner)),)


def _stride(mesh: Mesh, axis: Axis) -> int:
    """Return by how many ranks two neighbours on an axis differ."""
    stride = 1
    for inner in mesh.order[mesh.order.index(axis) + 1 :]:
        stride *= mesh.degree(inner)
    return stride
