# SPDX-License-Identifier: Apache-2.0
"""Degrees to choose, and the grid of ranks that they make."""

from __future__ import annotations

from functools import lru_cache

from echelon.config.cluster.settings import read_typed_cluster
from echelon.core.axis import Axis
from echelon.core.cluster import Cluster
from echelon.core.mesh import Mesh
from echelon.page.document import Fact
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.diagram import DiagramFigure, Place, Tile
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices
from echelon.page.mesh import mesh_figure
from echelon.planner.view.mesh_map import AxisFact, mesh_map

CLUSTER = "64xh100"
DEGREES = (1, 2, 4)  # ranks of an axis
_NAMES = {Axis.DP_REPLICATE: "data", Axis.PP: "pipeline", Axis.TP: "tensor"}
_CONTROLS = (
    LessonControl(name="dp", label="data ranks", values=tuple(map(str, DEGREES)), start=1),
    LessonControl(name="tp", label="tensor ranks", values=tuple(map(str, DEGREES)), start=1),
    LessonControl(name="pp", label="pipeline ranks", values=tuple(map(str, DEGREES)), start=1),
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
                    Fact(name="ranks", value=product, note="data x tensor x pipeline"),
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
        return Fact(name=name, value="none", note="each rank is alone on this axis")
    first = ", ".join(map(str, mesh.group(0, axis)))
    link = "no link" if found.link is None else found.link.name
    return Fact(
        name=name,
        value=f"{found.num_groups} of {found.degree}",
        note=f"the first is {first}; {found.where}, {link}",
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
                Tile(
                    id=f"rank {rank}",
                    label=str(rank),
                    words=_place_text(dp, tp, pp),
                    kind=pp,
                    row=pp,
                    column=tp,
                )
            )
    return Place(label=f"replica {dp}", note="", tiles=tuple(tiles))
