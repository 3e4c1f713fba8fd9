"""Every bug that is planted in kernels is caught and named."""

from __future__ import annotations

import pytest

from echelon.launch.local.pool import RankPool
from tests.proof.mutants import kernels
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught


@pytest.mark.parametrize(("mutant", "told"), mutants_of(kernels))
def test_a_bug_in_a_kernel_is_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool
) -> None:
    assert_caught(mutant, told, rank_pool)
