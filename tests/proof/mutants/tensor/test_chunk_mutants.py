"""Every bug in chunks of rows is caught, with the right tensor and the right words."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.mutants.tensor import chunks
from tests.proof.planted import assert_caught


@pytest.mark.quick("chunks:chunk_of_a_gradient_added_twice")
@pytest.mark.parametrize(("mutant", "told"), mutants_of(chunks))
def test_a_bug_in_chunks_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)
