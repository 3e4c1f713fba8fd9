"""torch's own compositions under proof: one that is right, one that is wrong without an error."""

from __future__ import annotations

import pytest

from bench.prove_peers.__main__ import COMPOSITIONS, Composed, composed_plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from echelon.proof.verdict import Proof

pytestmark = pytest.mark.timeout(300)
BY_LABEL = {composed.label: composed for composed in COMPOSITIONS}


def _prove(composed: Composed, pool: RankPool) -> Proof:
    subject = f"bench.prove_peers.{composed.subject}"
    plan = composed_plan(composed)
    return prove(plan, run_ranks=pool.run, subject=subject, own_precision=False)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["DDP", "FSDP2", "DTensor TP", "1F1B + DDP"])
def test_what_torch_does_right_is_proven(label: str, rank_pool: RankPool) -> None:
    proof = _prove(BY_LABEL[label], rank_pool)
    assert proof.proven, proof.diagnosis


def test_a_split_backward_does_not_sum_over_ddp_replicas(rank_pool: RankPool) -> None:
    proof = _prove(BY_LABEL["InterleavedZeroBubble + DDP"], rank_pool)
    assert proof.diagnosis is not None
    assert (proof.diagnosis.rule, proof.diagnosis.step) == ("prove-gradients", 0)
    assert (proof.diagnosis.factor, proof.diagnosis.axis) == ("missing sum", "dp")
    claims = {claim.rule.id: claim for claim in proof.passes[0].claims}
    assert claims["prove-microbatch-loss"].failures[0].step > 0


def test_without_replicas_the_same_schedule_is_right(rank_pool: RankPool) -> None:
    assert _prove(BY_LABEL["ZBV"], rank_pool).proven
