"""Bugs in what ZeRO++ keeps, rounds and sums are caught, each with the tensor and the claim."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.mutants.zero_plus_plus import int8_gather, quantised_sums, secondary
from tests.proof.planted import assert_caught


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("mutant", "told"), mutants_of(int8_gather, quantised_sums, secondary))
def test_a_planted_bug_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)
