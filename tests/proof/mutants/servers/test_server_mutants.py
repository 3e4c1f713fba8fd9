"""Every planted bug of parameter servers is caught and named."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.mutants.servers import asynchronous, synchronous
from tests.proof.planted import assert_caught


@pytest.mark.system("S06")
@pytest.mark.quick("synchronous:mean_of_means_on_servers")
@pytest.mark.parametrize(("mutant", "told"), mutants_of(synchronous))
def test_a_planted_bug_of_servers_is_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool
) -> None:
    """S06: unfair averages, a shard updated twice, a stale version taken for the new one."""
    assert_caught(mutant, told, rank_pool)


@pytest.mark.quick("asynchronous:shard_updated_twice")
@pytest.mark.parametrize(("mutant", "told"), mutants_of(asynchronous))
def test_a_planted_bug_of_asynchronous_servers_is_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool
) -> None:
    """S07: stale versions applied as fresh, shards updated twice, unfair averages, no bound.

    Which worker's step is the first wrong one depends on the order of the run.
    """
    proof = prove(told.of(**told.plan), run_ranks=rank_pool.run, subject=mutant)

    assert not proof.proven
    found = proof.diagnosis
    assert found is not None
    assert (found.rule, found.factor, found.axis) == (told.rule, told.factor, told.axis)
