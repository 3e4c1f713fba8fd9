"""Degrees that hold for experts are accepted, and so are those that are suggested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SPARSE, problems_of, write
from tests.config.suggestions import taken


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return write(tmp_path, SPARSE)


def test_dense_shards_that_experts_do_not_need_stay_without_effect(sparse: Path) -> None:
    found = problems_of(sparse, ["mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=2"])
    assert list(found) == ["no-effect"]
    assert found["no-effect"].key == "mesh.dp_shard"


def test_degrees_that_are_suggested_for_tp_suit_the_experts(sparse: Path) -> None:
    sets = ["mesh.ep=2", "mesh.tp=4", "model.kv_heads=6"]
    found = problems_of(sparse, sets)
    assert found["tp-divides-kv-heads"].suggestions == ("2", "6")
    for value in found["tp-divides-kv-heads"].suggestions:
        assert problems_of(sparse, ["mesh.ep=2", f"mesh.tp={value}"]) == {}


def test_pieces_of_experts_follow_the_degree_that_is_suggested(sparse: Path) -> None:
    sets = ["mesh.tp=4", "experts.expert_tp=4"]
    found = problems_of(sparse, sets)
    works = found["tp-divides-kv-heads"].suggestions
    assert "mesh.tp = 6 with experts.expert_tp = 6" in works
    for advice in works:
        assert problems_of(sparse, taken(advice, sets)) == {}
