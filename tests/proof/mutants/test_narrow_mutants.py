"""Bugs of a narrow dtype are caught in the plan's own precision, and named."""

from __future__ import annotations

import pytest

from echelon.launch.local.pool import RankPool
from tests.proof.mutants import narrow
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught


@pytest.mark.parametrize(("mutant", "told"), mutants_of(narrow))
def test_a_bug_of_a_narrow_dtype_is_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool
) -> None:
    assert_caught(mutant, told, rank_pool)
