"""What is cut over tp comes out even, and degrees that are suggested work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


@pytest.mark.system("S14")
def test_every_degree_that_is_suggested_for_tp_is_accepted(small: Path) -> None:
    for value in problems_of(small, ["mesh.tp=4"])["tp-divides-kv-heads"].suggestions:
        assert problems_of(small, [f"mesh.tp={value}"]) == {}


def test_the_vocabulary_need_not_divide(small: Path) -> None:
    assert problems_of(small, ["mesh.tp=2", "model.vocab=301"]) == {}


RING = ["mesh.tp=2", "mesh.sequence_parallel=true", "mesh.tp_overlap=ring"]
FUSED = [*RING[:2], "mesh.tp_overlap=symmetric-memory"]


def test_an_overlap_needs_tensor_ranks_and_rows_that_are_split(small: Path) -> None:
    assert problems_of(small, RING) == {}
    for kind in ("ring", "auto"):
        alone = problems_of(small, [f"mesh.tp_overlap={kind}"])["no-effect"]
        assert "mesh.tp = 1" in alone.message
        assert alone.suggestions[0] == "mesh.tp = 2 with mesh.sequence_parallel = true"
        whole = problems_of(small, ["mesh.tp=2", f"mesh.tp_overlap={kind}"])["no-effect"]
        assert "mesh.sequence_parallel only" in whole.message
        assert whole.suggestions[0] == "mesh.sequence_parallel = true"
        assert problems_of(small, [*RING[:2], f"mesh.tp_overlap={kind}"]) == {}


def test_a_sequence_must_come_out_even_among_the_chunks(small: Path) -> None:
    assert set(problems_of(small, [*RING, "batch.sequence_length=15"])) == {
        "sequence-parallel-divides-sequence"
    }


def test_symmetric_memory_is_that_of_gpus(small: Path) -> None:
    found = problems_of(small, FUSED)["symmetric-memory-reaches-ranks"]
    assert "are no GPUs (they talk over gloo)" in found.message
    assert found.suggestions == ('mesh.tp_overlap = "ring"', 'mesh.tp_overlap = "none"')
    assert problems_of(small, [*FUSED, "cluster.preset=2xh100"]) == {}


def test_symmetric_memory_stays_inside_of_a_node(small: Path) -> None:
    wide = ["mesh.tp=16", "model.heads=16", "model.kv_heads=16", "model.hidden=64"]
    wide += ["batch.sequence_length=32"]
    wide += ["mesh.sequence_parallel=true", "mesh.tp_overlap=symmetric-memory"]
    found = problems_of(small, [*wide, "cluster.preset=16xh100"])
    assert "mesh.tp = 16 spans nodes of 8 (8 % 16 = 8)" in (
        found["symmetric-memory-reaches-ranks"].message
    )
    assert problems_of(small, [*wide[:-1], "mesh.tp_overlap=ring", "cluster.preset=16xh100"]) == {}


def test_a_wrong_degree_is_told_of_a_dense_model_beside_settings_of_experts() -> None:
    sets = ["mesh.tp=3", "experts.expert_tp=3", "cluster.preset=8xh100"]
    sets += ["batch.global_sequences=8", "batch.sequence_length=1024"]
    assert {"no-effect", "tp-divides-heads"} <= {*problems_of("llama3-8b", sets)}
