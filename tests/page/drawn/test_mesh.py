"""Cells of a mesh lie in their nodes, and groups in words are those of the mesh."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from echelon.core.axis import Axis
from echelon.core.cluster import Cluster
from echelon.core.mesh import Mesh
from echelon.page.drawn.marks import ACCENT, TONES
from echelon.page.drawn.mesh import MOST_RANKS, draw_mesh, group, ranks_text
from echelon.planner.view.document import MeshAxis, MeshDigit, MeshFigure
from echelon.planner.view.mesh_map import mesh_figure, mesh_map
from tests.page.drawn.reading import HOSTILE, assert_words_are_clear, paths, texts
from tests.planner.view.test_mesh_map import maps
from tests.walks import examples


@settings(max_examples=examples(8), deadline=None)
@given(maps())
def test_any_mesh_is_drawn_with_its_own_groups(drawn: tuple[Mesh, Cluster, int]) -> None:
    mesh, cluster, expert_tp = drawn
    figure = mesh_figure(mesh_map(mesh, cluster, expert_tp=expert_tp))
    drawing = draw_mesh(figure, "Ranks", "")
    cells = sum(path.attrib["d"].count("M") for path in paths(drawing))
    assert cells == mesh.world_size
    said = " ".join(texts(drawing))
    for axis in figure.axes:
        if axis.name == Axis.EP.value:
            groups = mesh.expert_groups(expert_tp=expert_tp)
        else:
            groups = mesh.groups(Axis(axis.name))
        own = next(list(one) for one in groups if 0 in one)
        assert group(axis, 0) == own
        if len(own) <= 8:
            assert ranks_text(own) in said
    assert_words_are_clear(drawing)


def mesh(ranks: int, *axes: MeshAxis) -> MeshFigure:
    return MeshFigure(
        cluster=HOSTILE, device=HOSTILE, ranks=ranks, devices_per_node=8, axes=axes, words=()
    )


def axis(name: str, degree: int, stride: int) -> MeshAxis:
    digits = (MeshDigit(degree=degree, stride=stride),)
    return MeshAxis(name=name, degree=degree, digits=digits, link=HOSTILE, where=HOSTILE)


def test_rank_0_and_its_innermost_group_are_marked() -> None:
    drawing = draw_mesh(mesh(16, axis("pp", 2, 8), axis("tp", 4, 1)), "Ranks", "")
    counts = {
        (path.attrib["fill"], path.attrib["fill-opacity"]): path.attrib["d"].count("M")
        for path in paths(drawing)
    }
    idle = TONES["idle"]
    assert counts == {
        (ACCENT, "1"): 1,
        (TONES["communication"], "1"): 3,
        (idle, "0.6"): 4,
        (idle, "0.85"): 8,
    }
    assert_words_are_clear(drawing)


@pytest.mark.parametrize("ranks", [1, 7, 1024, MOST_RANKS, 4 * MOST_RANKS])
def test_as_many_ranks_as_can_be_told_apart_are_drawn(ranks: int) -> None:
    drawing = draw_mesh(mesh(ranks, axis("dp_shard", ranks, 1)), HOSTILE, HOSTILE)
    cells = sum(path.attrib["d"].count("M") for path in paths(drawing))
    assert cells == min(ranks, MOST_RANKS)
    assert any("ranks are drawn" in one for one in texts(drawing)) == (ranks > MOST_RANKS)
    assert_words_are_clear(drawing) if ranks < 2000 else None


def test_ranks_in_words_join_neighbours_and_end() -> None:
    assert ranks_text([0, 1, 2, 5, 8, 9]) == "0-2, 5, 8-9"
    assert ranks_text(list(range(0, 200, 2))).endswith("94 and 52 more")
