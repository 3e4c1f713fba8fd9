"""A worker computes and does not update, a server the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.oracle.batches import global_batch
from echelon.training.subject import build
from tests.parallel.servers.test_server import served_plan


def held_after_a_step(context: RankContext, argument: Any) -> dict[str, Any]:
    """Take a step, and return what this rank holds of it."""
    plan = Plan.from_json(argument)
    subject = build(context, plan)
    try:
        report = subject.step(global_batch(plan, 0), 0)
        engine = subject.engine
        return {
            "computes": engine.computes,
            "updates": engine.updates,
            "losses": len(report.microbatch_losses),
            "masters": sum(
                one.tensor.numel() for held in engine.masters().values() for one in held
            ),
            "gradients": bool(engine.gradients()),
            "shared": bool(engine.shared_state()),
            "loss": report.loss,
        }
    finally:
        subject.close()


def test_ranks_part_the_step(rank_pool: RankPool) -> None:
    """S06: both servers together hold every parameter once, and all hear the same loss."""
    plan = served_plan(2, 2)
    labels = [plan.mesh.label(rank) for rank in range(4)]
    target = f"{held_after_a_step.__module__}:{held_after_a_step.__name__}"
    ranks = rank_pool.run(target, plan.to_json(), 4, labels=labels)

    assert isinstance(ranks, Sequence)
    for worker in ranks[:2]:
        assert (worker["computes"], worker["updates"], worker["masters"]) == (True, False, 0)
        assert worker["losses"] == plan.num_microbatches
        assert not worker["gradients"]
        assert worker["shared"]
    for server in ranks[2:]:
        assert (server["computes"], server["updates"], server["losses"]) == (False, True, 0)
        assert server["gradients"]
        assert not server["shared"]
    assert len({one["loss"] for one in ranks}) == 1
    assert sum(server["masters"] for server in ranks[2:]) == sum(
        spec.numel for spec in parameters(plan.model)
    )
