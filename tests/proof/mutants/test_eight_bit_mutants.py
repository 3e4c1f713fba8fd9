"""Every planted bug in products of 8-bit numbers is caught, with the place where it begins."""

from __future__ import annotations

import pytest

from echelon.launch.local.pool import RankPool
from tests.proof.mutants import eight_bits
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught


@pytest.mark.parametrize(("mutant", "told"), mutants_of(eight_bits))
def test_a_planted_bug_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)


def test_five_bugs_are_planted() -> None:
    assert len(mutants_of(eight_bits)) == 5
