"""Ranks, coordinates and groups of a mesh with the user's names."""

from __future__ import annotations

from echelon.proof.evidence.mesh import NamedMesh

MESH = NamedMesh({"pp": 2, "dp": 1, "tp": 3})


def test_the_last_axis_varies_fastest() -> None:
    assert MESH.world_size == 6
    assert MESH.axes == ("pp", "tp")
    assert MESH.coordinates(5) == {"pp": 1, "dp": 0, "tp": 2}
    assert [MESH.label(rank) for rank in (0, 4)] == ["pp0 tp0", "pp1 tp1"]
    assert (str(MESH), str(NamedMesh({"dp": 1}))) == ("pp2 x tp3", "1")


def test_groups_differ_in_their_axes_only() -> None:
    assert MESH.group(1, ("pp",)) == (1, 4)
    assert MESH.group(4, ("tp",)) == (3, 4, 5)
    assert MESH.group(0, ("pp", "tp")) == tuple(range(6))
    assert (MESH.degree(("pp", "tp")), MESH.index(5, ("pp", "tp"))) == (6, 5)
    assert list(MESH.axis_sets()) == [("pp",), ("tp",), ("pp", "tp")]
