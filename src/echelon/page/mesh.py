# SPDX-License-Identifier: Apache-2.0
"""The figure of a mesh on a cluster: ranks on nodes, and the links of each axis."""

from __future__ import annotations

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.page.document import Section
from echelon.page.figures import DataTable, MeshAxis, MeshDigit, MeshFigure
from echelon.planner.view.mesh_map import AxisFact, MeshMap, mesh_map


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
