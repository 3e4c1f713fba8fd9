"""What a plan promised beside its mathematics is proven too: bytes sent and held, its order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.cost.bytes.all_reduce import SumGroup
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from echelon.proof.claims.predictions import bytes_by_axis
from echelon.proof.run import prove
from echelon.proof.verdict import Proof
from echelon.schedule.build import build_schedule
from echelon.training.subject import EngineSubject
from tests.proof.layouts import layout
from tests.proof.run.collectives import summed


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


def keeps_gradients(context: RankContext, plan: Plan) -> EngineSubject:
    """Build an engine that keeps whole buckets of gradients when their slices have been summed."""
    subject = EngineSubject(plan, context)
    for bucket in subject.engine.model.buckets:
        bucket.gradients_memory.release = lambda: None
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


def test_what_is_not_freed_is_found_though_the_numbers_are_right(rank_pool: RankPool) -> None:
    proof = prove(
        layout(dp=2, zero={"stage": 2, "accumulate": "slices"}),
        run_ranks=rank_pool.run,
        subject=f"{__name__}:keeps_gradients",
        own_precision=False,
    )
    assert failed(proof) == {"prove-bytes-held"}
    diagnosis = proof.diagnosis
    assert diagnosis is not None
    assert diagnosis.tensor == "gradients of rank 0"


def test_a_skipped_step_sends_what_updates_do_not() -> None:
    plan = layout(dp=2, zero={"stage": 1}, optimizer={"kind": "muon"})
    taken, skipped = (bytes_by_axis(plan, 0, skipped=skip) for skip in (False, True))
    assert taken == bytes_sent_by_axis(plan, 0)
    assert "stage" in taken
    assert "stage" not in skipped
    # Of a scatter of gradients and a gather of parameters, the gather is left out.
    assert skipped["dp_shard"] * 2 == taken["dp_shard"]
    assert {axis: taken[axis] for axis in ("dp", "world")} == {
        axis: skipped[axis] for axis in ("dp", "world")
    }


def test_what_stage_3_gathers_for_its_forward_is_sent_in_a_skipped_step_too() -> None:
    zero = {"stage": 3, "reshard_after_forward": False, "keep_whole_below": 64}
    plan = layout(dp=2, zero=zero)
    taken, skipped = (bytes_by_axis(plan, 0, skipped=skip)["dp_shard"] for skip in (False, True))
    kept = [b for b in plan_buckets(plan, rank_part(plan, 0)) if not b.sliced]
    assert [bucket.names for bucket in kept] != []
    assert taken - skipped == sum(bucket.num_elements // 2 * 4 for bucket in kept)


def test_bytes_on_the_wrong_tier_are_found(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two nodes has one rank: all bytes leave the node, and the formulas say none."""
    plan = summed(dp=2, pp=1, each=1, algorithm="backend")
    assert failed(prove(plan, run_ranks=rank_pool.run, own_precision=False)) == set()
    tiers = SumGroup.bytes_by_tier
    monkeypatch.setattr(SumGroup, "bytes_by_tier", lambda self, *size: tiers(self, *size)[::-1])
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    assert failed(proof) == {"prove-bytes-sent"}
    diagnosis = proof.diagnosis
    assert diagnosis is not None
    assert (diagnosis.axis, diagnosis.tensor) == ("dp", "bytes of rank 0 over dp to other nodes")


def test_messages_between_stages_on_two_nodes_are_told_apart(rank_pool: RankPool) -> None:
    """The first and the second stage are on different nodes."""
    plan = summed(dp=1, pp=2, each=1, algorithm="backend")
    assert {term.name for term in bytes_sent(plan, 0) if term.axis == "pp"} == {
        "activations, to other nodes"
    }
    assert failed(prove(plan, run_ranks=rank_pool.run, own_precision=False)) == set()
