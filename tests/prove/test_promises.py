"""What a plan promised beside its mathematics is proven too: bytes sent, order of actions."""

from __future__ import annotations

from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.pool import RankPool
from echelon.prove.proof import Proof
from echelon.prove.run import prove
from echelon.schedule.build import build_schedule
from echelon.train.subject import EngineSubject
from tests.prove.layouts import layout


def sends_once_more(context: RankContext, plan: Plan) -> EngineSubject:
    """Build an engine that sums a tensor of zeros over the data ranks after every step."""
    subject = EngineSubject(plan, context)
    finish = subject.engine.model.reduction.finish

    def once_more() -> None:
        finish()
        zeros = torch.zeros(6, dtype=torch.float64)
        subject.engine.groups.data.all_reduce(zeros, name="of no use")

    subject.engine.model.reduction.finish = once_more
    return subject


def runs_gpipe(context: RankContext, plan: Plan) -> EngineSubject:
    """Build an engine that runs all forward passes first, whatever the plan says."""
    subject = EngineSubject(plan, context)
    subject.engine.schedule = build_schedule(
        "gpipe",
        num_stages=plan.num_stages,
        num_ranks=plan.mesh.pp,
        num_microbatches=plan.num_microbatches,
    )
    return subject


def proof_of(pool: RankPool, subject: Any) -> Proof:
    """Return the proof of a small plan with two stages and two replicas."""
    name = f"{subject.__module__}:{subject.__name__}"
    return prove(layout(dp=2, pp=2), run_ranks=pool.run, subject=name, own_precision=False)


def failed(proof: Proof) -> set[str]:
    """Return the rules of the claims that do not hold."""
    return {claim.rule.id for one in proof.passes for claim in one.claims if not claim.holds}


def test_a_collective_too_many_is_found_though_the_numbers_are_right(rank_pool: RankPool) -> None:
    proof = proof_of(rank_pool, sends_once_more)
    assert failed(proof) == {"prove-bytes-sent"}
    diagnosis = proof.diagnosis
    assert diagnosis is not None
    assert diagnosis.axis == "dp"
    assert "by the formulas" in diagnosis.says


def test_another_order_is_found_though_the_numbers_are_right(rank_pool: RankPool) -> None:
    proof = proof_of(rank_pool, runs_gpipe)
    assert failed(proof) == {"prove-schedule-order"}
    diagnosis = proof.diagnosis
    assert diagnosis is not None
    assert diagnosis.says == "action 2 was F0.2, the schedule has BW0.0"
