"""Planted bugs of islands that are lost and come back are caught and named."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.proof.replays.runs import run_with_a_lost_island
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.replays import planted


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "told"), mutants_of(planted))
def test_a_planted_bug_of_lost_islands_is_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B06: a mean over islands that were not there, a momentum that is not given."""
    monkeypatch.setattr("echelon.proof.replays.records.COMES_WITHIN_S", 15.0)
    found = run_with_a_lost_island(told.of(), run_ranks=rank_pool.run, subject=mutant)

    assert not found.holds
    assert found.diagnosis is not None
    named = (found.diagnosis.rule, found.diagnosis.factor, found.diagnosis.axis)
    assert named == (told.rule, told.factor, told.axis), found.diagnosis.sentence()
