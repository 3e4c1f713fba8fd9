"""Every planted bug inside of attention is caught and named."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.mutants.attention import inside
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("mutant", "told"), mutants_of(inside))
def test_a_planted_bug_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)
