"""FSDP1: flat slices are read from its handles, with and without the original parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.verify.planted_programs import proof_of

RUN_ORIGINAL = {"ORIGINAL = False": "ORIGINAL = True"}


@pytest.mark.parametrize("changes", [{}, RUN_ORIGINAL])
def test_it_is_proven(changes: dict[str, str], rank_pool: RankPool, tmp_path: Path) -> None:
    proof = proof_of(rank_pool, tmp_path, "fsdp1", changes)
    assert proof.proven, proof.diagnosis
    assert (proof.framework, proof.num_parameters) == ("FSDP1", 12)


def test_a_rate_of_one_rank_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    changes = {
        "        optimizer.step()": "        for group in optimizer.param_groups:\n"
        "            group['lr'] = 1e-2 * (1 + 2 * case.rank)\n        optimizer.step()"
    }
    told = proof_of(rank_pool, tmp_path, "fsdp1", changes).diagnosis
    assert told is not None
    assert (told.rule, told.factor, told.axis) == ("prove-clipped-update", "number", "dp")
    assert (told.value, told.ranks) == (pytest.approx(3.0), (1,))
    assert told.where == "split over dp"
