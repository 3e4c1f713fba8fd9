"""The grid of three degrees: product, coordinates and groups are those of the mesh."""

from __future__ import annotations

import pytest

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.page.lessons.grid import coordinates_text, three_degrees
from echelon.page.lessons.lesson import choices
from echelon.planner.view.document import MeshFigure
from tests.page.lessons.shown import diagrams, facts


@pytest.mark.system("S58")
def test_every_choice_has_the_ranks_of_its_mesh() -> None:
    lesson = three_degrees()
    for chosen, scene in zip(choices(lesson.controls), lesson.scenes, strict=True):
        degrees = {name: int(value) for name, value in chosen.items()}
        mesh = Mesh(pp=degrees["pp"], dp_replicate=degrees["dp"], tp=degrees["tp"])
        (frame,) = scene.frames
        product = f"{mesh.dp} x {mesh.tp} x {mesh.pp} = {mesh.world_size}"
        assert facts(frame)["ranks"] == product
        (board,) = diagrams(frame)
        drawn = {
            int(tile.label): (tile.words, place.label, tile.row, tile.column)
            for place in board.places
            for tile in place.tiles
        }
        assert sorted(drawn) == list(range(mesh.world_size))
        for rank, (words, replica, row, column) in drawn.items():
            here = mesh.coordinates(rank)
            assert words == coordinates_text(mesh, rank)
            assert replica == f"replica {here[Axis.DP_REPLICATE]}"
            assert (row, column) == (here[Axis.PP], here[Axis.TP])
        figure = next(one for one in frame.figures if isinstance(one, MeshFigure))
        assert figure.ranks == mesh.world_size


def test_groups_are_counted_as_the_mesh_has_them() -> None:
    mesh = Mesh(pp=4, dp_replicate=2, tp=4)
    (frame,) = three_degrees().scene(dp="2", tp="4", pp="4").frames
    told = facts(frame)
    for axis, name in ((Axis.DP_REPLICATE, "data"), (Axis.TP, "tensor"), (Axis.PP, "pipeline")):
        groups = mesh.groups(axis)
        assert told[f"{name} groups"] == f"{len(groups)} of {len(groups[0])}"
    (alone,) = three_degrees().scene(dp="1", tp="1", pp="1").frames
    assert facts(alone)["tensor groups"] == "none"
