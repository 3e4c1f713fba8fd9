"""A whole run with islands of local SGD beside islands of the independent implementation."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.launch.local.supervisor import RankPool
from echelon.proof.shrink import shrink
from echelon.proof.whole_run.whole_run import whole_run_pass

EVERY_2 = ("local_sgd.every=2", "mesh.dp_replicate=2")


@pytest.mark.one_in(2)
@pytest.mark.system("B06")
@pytest.mark.parametrize(
    "flags",
    [
        (*EVERY_2, "train.steps=300"),
        (*EVERY_2, "local_sgd.delay=1", "train.steps=301"),
        (*EVERY_2, "batch.global_sequences=2", "batch.microbatch_sequences=1", "train.steps=300"),
    ],
    ids=["two steps", "one step late", "one sequence"],
)
def test_a_whole_run_of_islands_holds(rank_pool: RankPool, flags: tuple[str, ...]) -> None:
    """B06: each island says its own losses, and validates on its part of what is held out."""
    shrunk = shrink(load_job("nano", flags).plan, precision="fp64")
    assert shrunk.mathematics.local_sgd.active
    found = whole_run_pass(shrunk, run_ranks=rank_pool.run)
    assert found.diagnosis is None
    assert [claim.holds for claim in found.claims] == [True] * 5
    assert all(claim.compared for claim in found.claims)
