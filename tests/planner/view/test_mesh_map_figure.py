"""The figure of a mesh: its digits give the groups that the mesh has."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.axis import MESH_AXES, Axis
from echelon.core.plan import Plan
from echelon.page.documents.plan import plan_page
from echelon.page.html import page_html
from echelon.planner.view.document import MeshAxis, MeshFigure
from echelon.planner.view.mesh_map import mesh_map, mesh_section


def figure_of(plan: Plan) -> MeshFigure:
    figure = mesh_section(plan).figure
    assert isinstance(figure, MeshFigure)
    return figure


def group_of(axis: MeshAxis, rank: int) -> tuple[int, ...]:
    """Return the group of a rank as the page finds it (`web/src/figures/mesh.ts`)."""
    found = [rank]
    for digit in axis.digits:
        first = [one - one // digit.stride % digit.degree * digit.stride for one in found]
        found = [one + place * digit.stride for one in first for place in range(digit.degree)]
    return tuple(sorted(found))


EXPERTS = ("model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.ffn=32")
PLANS = [
    ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2"),
    ("mesh.dp_shard=4", "mesh.cp=2", "zero.stage=3", "batch.sequence_length=128"),
    (*EXPERTS, "mesh.dp_shard=4", "mesh.ep=2"),
    (*EXPERTS, "mesh.dp_shard=2", "mesh.cp=2", "mesh.ep=4"),
    (*EXPERTS, "mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=4", "mesh.sequence_parallel=true"),
    # Groups that end inside of a context group.
    (
        *EXPERTS,
        *("mesh.dp_shard=4", "mesh.cp=3", "mesh.ep=4", "batch.sequence_length=96"),
        "cluster.preset=12xcpu",
    ),
]


@pytest.mark.parametrize("settings", PLANS)
def test_digits_give_the_groups_of_the_mesh(settings: tuple[str, ...]) -> None:
    plan = load_job("nano", settings).plan
    figure, mesh = figure_of(plan), plan.mesh
    wanted = {axis.value: mesh.groups(axis) for axis in MESH_AXES if mesh.degree(axis) > 1}
    if mesh.ep > 1:
        wanted[Axis.EP.value] = mesh.expert_groups(expert_tp=plan.layout.experts.expert_tp)
    assert {axis.name for axis in figure.axes} == set(wanted)
    for axis in figure.axes:
        for group in wanted[axis.name]:
            for rank in group:
                assert group_of(axis, rank) == tuple(sorted(group))


def test_links_and_nodes_are_those_of_the_cluster() -> None:
    settings = ("cluster.preset=16xh100", "mesh.dp_shard=2", "mesh.tp=8", "zero.stage=1")
    plan = load_job("llama3-8b", settings).plan
    section = mesh_section(plan)
    figure = figure_of(plan)
    assert (figure.ranks, figure.devices_per_node, figure.device) == (
        16,
        plan.cluster.devices_per_node,
        plan.cluster.device.name,
    )
    where = {axis.name: (axis.link.split(",")[0], axis.where) for axis in figure.axes}
    assert where["tp"][1] == "in a node"
    assert where["dp_shard"][1] == "crosses"
    assert section.table is not None
    assert {row[0]: row[-1] for row in section.table.rows} == {k: v[0] for k, v in where.items()}


def test_servers_are_beside_the_grid() -> None:
    """Ranks of the figure are those of the mesh; servers are told in words, and drawn as such."""
    settings = ("mesh.dp_replicate=2", "servers.count=2", "cluster.preset=4xcpu")
    plan = load_job("nano", settings).plan
    figure = figure_of(plan)
    assert figure.ranks == 2
    assert figure.words == ("ranks 2-3 are servers, beside these ranks",)
    assert mesh_section(plan).summary.startswith("dp_replicate 2 = 2 ranks, and 2 servers, on")
    found = mesh_map(plan.mesh, plan.cluster)
    assert [one.coordinates for one in found.devices(0)] == [
        ("dp0",),
        ("dp1",),
        ("server",),
        ("server",),
    ]
    page_html(plan_page(plan))
