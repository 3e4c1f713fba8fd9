# SPDX-License-Identifier: Apache-2.0
"""Ranks as a grid: its degrees, and the links that each axis travels over."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from echelon.config.cluster.settings import read_typed_cluster
from echelon.core.axis import Axis
from echelon.core.cluster import Cluster
from echelon.core.mesh import Mesh
from echelon.core.units import decimal_bytes
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Frame,
    Lesson,
    LessonControl,
    Move,
    Place,
    Scene,
    Tile,
    choices,
)
from echelon.page.lessons.matrices import mlp_weights
from echelon.planner.view.document import DataTable, Fact
from echelon.planner.view.mesh_map import AxisFact, axis_facts, mesh_figure, mesh_map

CLUSTER = "64xh100"
DEGREES = (1, 2, 4)  # ranks of an axis
_NAMES = {Axis.DP_REPLICATE: "data", Axis.PP: "pipeline", Axis.TP: "tensor"}
_CONTROLS = (
    LessonControl(name="dp", label="data ranks", values=tuple(map(str, DEGREES)), start=1),
    LessonControl(name="tp", label="tensor ranks", values=tuple(map(str, DEGREES)), start=1),
    LessonControl(name="pp", label="pipeline ranks", values=tuple(map(str, DEGREES)), start=1),
)

DP = 2  # data ranks
TP = 4  # tensor ranks
PP = 2  # pipeline ranks
HIDDEN = 4096  # width of the model
FFN = 16384  # columns of the matrix that is told of
PIPELINE_FIRST, DATA_FIRST = "pipeline outermost", "data outermost"
CLUSTERS = ("16xh100", "16xgb200")
_LINKS_CONTROLS = (
    LessonControl(name="order", label="order of ranks", values=(DATA_FIRST, PIPELINE_FIRST)),
    LessonControl(name="cluster", label="cluster", values=CLUSTERS),
)
_AXES = (
    (Axis.TP, "tensor", "sum activations in each layer"),
    (Axis.PP, "pipeline", "hand activations on, and gradients back"),
    (Axis.DP_REPLICATE, "data", "sum gradients once a step"),
)


def three_degrees() -> Lesson:
    """Return the lesson: a scene for each choice of the three degrees."""
    return Lesson(
        id="three-degrees",
        topic="Several splits at once",
        title="The grid of ranks: data x tensor x pipeline",
        rows=("M8",),
        summary=(
            "The three degrees multiply to the number of ranks. Each rank has one place on each "
            "axis, and talks on an axis to those that differ from it there alone."
        ),
        source=f"the mesh of the engine and the links of a cluster, {CLUSTER}",
        controls=_CONTROLS,
        scenes=tuple(
            _scene(Mesh(pp=int(one["pp"]), dp_replicate=int(one["dp"]), tp=int(one["tp"])))
            for one in choices(_CONTROLS)
        ),
        corrections=corrections("distributed-30", "distributed-49", "distributed-54"),
        commands=(
            "echelon plan llama3-8b --cluster 8xh100 "
            "--set mesh.dp_replicate=2 --set mesh.tp=2 --set mesh.pp=2",
        ),
    )


def _scene(mesh: Mesh) -> Scene:
    cluster = _cluster()
    product = f"{mesh.dp} x {mesh.tp} x {mesh.pp} = {mesh.world_size}"
    placed = mesh_map(mesh, cluster)
    facts = {fact.axis: fact for fact in placed.facts}
    count = "1 rank" if mesh.world_size == 1 else f"{mesh.world_size} ranks"
    return Scene(
        frames=(
            Frame(
                caption=f"{product}: {count}. Below, each replica of the model has a box, with a "
                "row for each stage and a column for each tensor rank; then the ranks on their "
                "devices, where a rank can be chosen.",
                figures=(_cube(mesh), mesh_figure(placed)),
                facts=(
                    Fact("ranks", product, "data x tensor x pipeline"),
                    *(_fact(mesh, axis, facts.get(axis)) for axis in _NAMES),
                ),
            ),
        )
    )


@lru_cache(maxsize=1)
def _cluster() -> Cluster:
    return read_typed_cluster(CLUSTER, "lesson")


def _fact(mesh: Mesh, axis: Axis, found: AxisFact | None) -> Fact:
    name = f"{_NAMES[axis]} groups"
    if found is None:
        return Fact(name, "none", "each rank is alone on this axis")
    first = ", ".join(map(str, mesh.group(0, axis)))
    link = "no link" if found.link is None else found.link.name
    return Fact(
        name,
        f"{found.num_groups} of {found.degree}",
        f"the first is {first}; {found.where}, {link}",
    )


def coordinates_text(mesh: Mesh, rank: int) -> str:
    """Return where a rank is on the three axes: ``dp 0, tp 1, pp 0``."""
    here = mesh.coordinates(rank)
    return _place_text(here[Axis.DP_REPLICATE], here[Axis.TP], here[Axis.PP])


def _place_text(dp: int, tp: int, pp: int) -> str:
    return f"dp {dp}, tp {tp}, pp {pp}"


def _cube(mesh: Mesh) -> DiagramFigure:
    return DiagramFigure(
        kinds=tuple(f"stage {stage}" for stage in range(mesh.pp)),
        places=tuple(_replica(mesh, dp) for dp in range(mesh.dp)),
    )


def _replica(mesh: Mesh, dp: int) -> Place:
    tiles: list[Tile] = []
    for pp in range(mesh.pp):
        for tp in range(mesh.tp):
            rank = mesh.rank({Axis.DP_REPLICATE: dp, Axis.PP: pp, Axis.TP: tp})
            tiles.append(
                Tile(f"rank {rank}", str(rank), _place_text(dp, tp, pp), pp, row=pp, column=tp)
            )
    return Place(label=f"replica {dp}", note="", tiles=tuple(tiles))


def mesh_of(order: str) -> Mesh:
    """Return the mesh 2 x 4 x 2 with its ranks in this order."""
    return Mesh(pp=PP, dp_replicate=DP, tp=TP, replicas_outermost=order == DATA_FIRST)


def grid_and_links() -> Lesson:
    """Return the lesson: the grid, then the groups of each axis with the links between them."""
    return Lesson(
        id="grid-and-links",
        topic="Several splits at once",
        title="Sixteen ranks, and the links that each axis uses",
        rows=("M23",),
        summary=(
            "Tensor ranks talk most and have to be neighbours. Which of the other two axes leaves "
            "a node is decided by the order of ranks, and by how many devices a node has."
        ),
        source=(
            "the mesh of the engine; the links of each axis are found as echelon plan finds them. "
            "A run has the pipeline outermost; data is, where replicas are islands of local SGD"
        ),
        controls=_LINKS_CONTROLS,
        scenes=tuple(
            _links_scene(mesh_of(one["order"]), _links_cluster(one["cluster"]))
            for one in choices(_LINKS_CONTROLS)
        ),
        corrections=corrections("llm-training-61", "llm-training-62", "distributed-08"),
    )


@lru_cache(maxsize=len(CLUSTERS))
def _links_cluster(name: str) -> Cluster:
    return read_typed_cluster(name, "lesson")


def _links_scene(mesh: Mesh, cluster: Cluster) -> Scene:
    facts = {fact.axis: fact for fact in axis_facts(mesh, cluster)}
    grid = Frame(
        caption=f"Step 1: {DP} x {TP} x {PP} = {mesh.world_size} ranks on {cluster.nodes} nodes of "
        f"{cluster.devices_per_node}. A box is one stage of one replica; its tiles are its tensor "
        "ranks, each with its columns of each matrix.",
        figures=(_figure(mesh, cluster, None),),
        facts=tuple(
            Fact(f"rank {rank}", coordinates_text(mesh, rank))
            for rank in (4, 8, mesh.world_size - 1)
        ),
    )
    steps = tuple(
        Frame(
            caption=f"Step {number}, {name}: ranks of a {name} group {does}. "
            + _where(facts[axis]),
            figures=(_figure(mesh, cluster, axis),),
            facts=_link_facts(mesh, axis, facts[axis]),
        )
        for number, (axis, name, does) in enumerate(_AXES, start=2)
    )
    rows = [
        (name, _groups_text(mesh, axis), facts[axis].where, _speed(facts[axis]))
        for axis, name, _ in _AXES
    ]
    table = DataTable(head=("axis", "groups", "nodes", "link, each way"), rows=tuple(rows))
    return Scene(frames=(grid, *steps), table=table)


def _where(fact: AxisFact) -> str:
    if not fact.num_across:
        return "Every group is inside of one node."
    if fact.link is not None and fact.link.name.startswith("NVLink"):
        return "Groups cross nodes, but all nodes of the rack are joined by NVLink."
    return "Every group crosses nodes."


def _speed(fact: AxisFact) -> str:
    if fact.link is None:
        return "none"
    return f"{fact.link.name}, {decimal_bytes(fact.link.bandwidth)}/s"


def _groups_text(mesh: Mesh, axis: Axis) -> str:
    return "; ".join(", ".join(map(str, group)) for group in mesh.groups(axis))


def _link_facts(mesh: Mesh, axis: Axis, fact: AxisFact) -> tuple[Fact, ...]:
    return (
        Fact("groups", f"{fact.num_groups} of {fact.degree} ranks", _groups_text(mesh, axis)),
        Fact("link", _speed(fact), "each way, of one device"),
        Fact("groups that cross nodes", f"{fact.num_across} of {fact.num_groups}"),
    )


def _figure(mesh: Mesh, cluster: Cluster, axis: Axis | None) -> DiagramFigure:
    """Return the grid, node by node, with the links of one axis."""
    blocks = range(0, mesh.world_size, TP)
    places = tuple(_block(mesh, cluster, first) for first in blocks)
    pairs = () if axis is None else mesh.groups(axis)
    moves = tuple(
        Move(f"rank {one}", f"rank {other}", f"rank {one} and rank {other}")
        for group in pairs
        for one, other in pairwise(group)
    )
    kinds = tuple(f"columns {start} to {stop - 1}" for start, stop in map(_columns, range(TP)))
    return DiagramFigure(kinds=kinds, places=places, moves=moves)


def _columns(tp: int) -> tuple[int, int]:
    return mlp_weights(HIDDEN, FFN)[0].local_range(TP, tp)


def _block(mesh: Mesh, cluster: Cluster, first: int) -> Place:
    """Return one stage of one replica: the tensor ranks from `first` on."""
    here = mesh.coordinates(first)
    tiles = tuple(
        Tile(
            id=f"rank {first + tp}",
            label=str(first + tp),
            words=coordinates_text(mesh, first + tp),
            kind=tp,
            column=tp,
        )
        for tp in range(TP)
    )
    return Place(
        label=f"replica {here[Axis.DP_REPLICATE]}, stage {here[Axis.PP]}",
        note="",
        tiles=tiles,
        group=f"node {first // cluster.devices_per_node}",
    )
