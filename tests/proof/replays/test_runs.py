"""Proofs of runs that lose an island in a meeting: who met, a replay, the bytes.

Evidence of row B06: given who met, one process comes to the same in float64.
"""

from __future__ import annotations

import pytest

from echelon.core.rulebook.islands import PROVE_LOST_ISLAND, PROVE_MEETINGS_REPLAYED
from echelon.core.rulebook.prove import PROVE_BYTES_SENT
from echelon.launch.local.supervisor import RankPool
from echelon.proof.replays.runs import run_with_a_lost_island
from echelon.proof.run import OUR_ENGINE, prove
from tests.proof.layouts import layout
from tests.proof.replays.planted import elastic
from tests.proof.run.local_sgd import NESTEROV, with_islands

LOST = {"min_islands": 1, **NESTEROV}
PLANS = {
    "tensor": with_islands(layout(tp=2), every=2, **LOST),
    "pipeline": with_islands(layout(pp=2, tied=True), every=2, **LOST),
    "zero-0": with_islands(layout(zero={"stage": 0}, dp=2), every=2, **LOST),
    "zero-1": with_islands(layout(zero={"stage": 1}, dp=2), every=2, **LOST),
    "zero-2": with_islands(layout(zero={"stage": 2}, dp=2), every=2, **LOST),
    "zero-3": with_islands(layout(zero={"stage": 3}, dp=2), every=2, **LOST),
    "of-3": with_islands(layout(tp=2), 3, every=2, **LOST),
    "fragments": with_islands(layout(tp=2), every=3, fragments=2, **LOST),
    "stays-away": with_islands(layout(), every=2, restarts=0, **LOST),
    "averaged": with_islands(layout(), every=2, min_islands=1),
}


@pytest.mark.system("B06")
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_run_that_loses_an_island_is_that_of_one_process(rank_pool: RankPool, name: str) -> None:
    """B06: every rank of every island, at every meeting, to 1e-10; bytes are the formulas'."""
    found = run_with_a_lost_island(PLANS[name], run_ranks=rank_pool.run, subject=OUR_ENGINE)

    assert found.holds, found.diagnosis
    told = {claim.rule.id: claim for claim in found.claims}
    for rule in (PROVE_LOST_ISLAND, PROVE_MEETINGS_REPLAYED, PROVE_BYTES_SENT):
        assert told[rule.id].compared > 0
    assert told[PROVE_MEETINGS_REPLAYED.id].max_error <= 1e-10


def test_a_proof_tells_islands_without_a_loss_and_with_one(rank_pool: RankPool) -> None:
    """B06: what does not depend on losses is proven as ever."""
    proof = prove(elastic(), run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert [one.precision for one in proof.passes] == [
        "fp64, island 0",
        "fp64, island 1",
        "fp64, island 1 lost",
    ]
