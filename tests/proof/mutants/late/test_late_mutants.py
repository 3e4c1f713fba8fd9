"""Every missing wait and every early free is told by the name of the operation."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.mutants.late import early_frees, missing_waits
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught


@pytest.mark.one_in(20)
@pytest.mark.parametrize(("mutant", "told"), mutants_of(missing_waits, early_frees))
def test_a_race_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)
