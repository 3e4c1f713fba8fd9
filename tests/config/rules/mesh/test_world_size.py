"""Meshes of as many ranks as were started, and those that are offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


@pytest.mark.system("S38")
@pytest.mark.parametrize("ranks", [1, 6, 7, 12, 64])
def test_a_wrong_world_size_lists_the_nearest_meshes_that_work(small: Path, ranks: int) -> None:
    sets = ["mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2", "cluster.preset=64xcpu"]
    assert problems_of(small, sets, world_size=8) == {}
    found = problems_of(small, sets, world_size=ranks)
    assert list(found) == ["world-size-is-product"]
    problem = found["world-size-is-product"]
    started = "1 rank was" if ranks == 1 else f"{ranks} ranks were"
    assert f"{started} started" in problem.message
    assert problem.message.endswith("= 8")
    *meshes, last = problem.suggestions
    assert last == "8 ranks"
    assert len(meshes) == {1: 1, 6: 4, 7: 0, 12: 4, 64: 2}[ranks]
    for mesh in meshes:
        degrees = [part.split() for part in mesh.split(" x ")]
        again = [f"mesh.{axis}={degree}" for axis, degree in degrees] + sets[3:]
        assert problems_of(small, again, world_size=ranks) == {}
