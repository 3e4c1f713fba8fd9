"""What a planted bug must be told as."""

from __future__ import annotations

import pytest

from echelon.core.errors import ProofFailed
from echelon.core.messages.plurals import in_singular
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.proof.mutants.planting import Told


def assert_caught(mutant: str, told: Told, rank_pool: RankPool) -> None:
    """Prove a plan whose engine has the bug; the proof must fail, and say what is wrong."""
    proof = prove(
        told.of(**told.plan),
        run_ranks=rank_pool.run,
        subject=mutant,
        own_precision=told.own_precision,
        late=told.late,
    )

    assert not proof.proven
    found = proof.diagnosis
    assert found is not None
    said = (found.rule, found.tensor, found.factor, found.axis, found.step)
    wanted = (told.rule, told.tensor, told.factor, told.axis, told.step)
    assert said == wanted, found.sentence()
    with pytest.raises(ProofFailed) as failed:
        proof.require()
    assert told.rule in failed.value.rules
    assert in_singular(found.sentence()) in str(failed.value)
