"""Context ranks and heads: degrees that are suggested leave something to exchange."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_meshes_for_other_ranks_split_cp_too_where_a_sequence_is_cut(small: Path) -> None:
    problem = problems_of(small, ["mesh.cp=4"], world_size=8)["world-size-is-product"]
    assert "cp 4 x tp 1 = 4" in problem.message
    for mesh in (works := problem.suggestions[:-1]):
        degrees = [part.split() for part in mesh.split(" x ")]
        again = [f"mesh.{axis}={degree}" for axis, degree in degrees]
        assert problems_of(small, again, world_size=8) == {}
    assert any("cp 8" in mesh or "cp 2" in mesh for mesh in works)
    whole = problems_of(small, ["mesh.dp_replicate=4"], world_size=8)["world-size-is-product"]
    assert not any("cp" in mesh for mesh in whole.suggestions)


def test_tensor_ranks_leave_heads_for_an_exchange(small: Path) -> None:
    sets = ["mesh.cp=4", "context.kind=ulysses", "cluster.preset=32xh100"]
    found = problems_of(small, [*sets, "mesh.tp=4"])
    assert set(found) == {"tp-divides-kv-heads", "ulysses-divides-heads"}
    assert found["tp-divides-kv-heads"].suggestions == ("1", "3")
    for tp in (1, 3):
        assert problems_of(small, [*sets, f"mesh.tp={tp}"]) == {}
