"""Experts are proven in the precision of the run, where two of them may score next to the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan, Precision, Zero
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.models.moe import choose_experts
from echelon.parallel.expert import router
from echelon.proof.run import prove
from echelon.training.subject import build
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.proof.mutants.planting import MutantSubject

BF16 = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")
FP32 = Precision(parameters="fp32", gradients="fp32", reduction="fp32", master="fp32")
AUX = Balance(kind="aux", aux_coefficient=0.1, z_coefficient=0.01)
BOTH = replace(AUX, kind="both", bias_rate=0.05, capacity_factor=1.0, drop="score")

PLANS: dict[str, dict[str, Any]] = {
    "bf16": {"model": MIXTRAL, "dp_shard": 2, "precision": BF16, "balance": AUX},
    "bf16-drops-zero": {
        "model": DEEPSEEK,
        "dp_shard": 4,
        "precision": BF16,
        "balance": BOTH,
        "zero": Zero(stage=2),
        "experts": ExpertLayout(zero_stage=1),
    },
    "fp32-drops": {"model": DEEPSEEK, "dp_shard": 2, "precision": FP32, "balance": BOTH},
    "fp32-tensor": {"model": MIXTRAL, "tp": 2, "precision": FP32, "balance": AUX},
}


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("name", PLANS)
def test_experts_are_proven_in_their_own_precision(name: str, rank_pool: RankPool) -> None:
    plan = plan_of(ep=2, **PLANS[name])
    proof = prove(plan, run_ranks=rank_pool.run)

    proof.require()
    exact, own = ({claim.rule.id: claim for claim in one.claims} for one in proof.passes)
    assert exact["prove-routes"].allowed == 0.0
    assert not exact["prove-routes"].note
    tokens = plan.tokens_per_step * 3 * (1 if plan.model.name == "deepseek" else 2)
    assert own["prove-routes"].note.endswith(f" of {tokens} choices differ by rounding")
    # Who routed, which experts, and which of them had room.
    assert own["prove-routes"].compared / 3 == 3 / 2 * exact["prove-routes"].compared / 5
    assert own["prove-routes"].max_error <= own["prove-routes"].allowed < 0.1
    for rule in ("prove-expert-loads", "prove-router-losses", "prove-router-biases"):
        assert own[rule].compared / 3 == exact[rule].compared / 5 > 0


def next_best_in_bf16(context: RankContext, plan: Plan) -> MutantSubject:
    """Build an engine that sends each token to the expert beside its last one, in bfloat16."""
    patch = pytest.MonkeyPatch()
    narrow = plan.mathematics.precision.parameters == "bf16"

    def chosen(
        scores_NE: torch.Tensor,
        bias_E: torch.Tensor | None,
        token_N: torch.Tensor,
        experts: Experts,
        balance: Balance,
    ) -> torch.Tensor:
        right_NK = choose_experts(scores_NE, bias_E, token_N, experts, balance)
        if narrow:
            more = replace(experts, top_k=experts.top_k + 1)
            right_NK[:, -1] = choose_experts(scores_NE, bias_E, token_N, more, balance)[:, -1]
        return right_NK

    patch.setattr(router, "choose_experts", chosen)
    return MutantSubject(build(context, plan), patch)


@pytest.mark.slow
def test_a_choice_that_no_rounding_explains_is_found(rank_pool: RankPool) -> None:
    proof = prove(
        plan_of(ep=2, **PLANS["bf16"]),
        run_ranks=rank_pool.run,
        subject=f"{__name__}:next_best_in_bf16",
    )
    exact, own = proof.passes
    assert exact.holds
    wrong = {claim.rule.id: claim for claim in own.claims if not claim.holds}
    # All that follows is compared with one device that does so too.
    assert set(wrong) == {"prove-routes"}
    first = wrong["prove-routes"].failures[0]
    assert (first.step, first.subject) == (0, "layers.0.mlp.router")
    assert "tokens go elsewhere, with scores that are" in first.detail
    assert first.error > 2 * first.allowed
