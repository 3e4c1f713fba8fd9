"""Every mistake of a mixture shows in the losses; without one they are the right ones."""

from __future__ import annotations

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.plan import Plan
from echelon.proof.causes.forward.experts import WrongMixture, expert_variants
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import OracleStep, build_decoder, run_oracle, token_losses
from echelon.proof.shrink import shrink
from tests.parallel.layouts import DEEPSEEK, GPT2, MIXTRAL, plan_of

PLANS = {
    "dropping": plan_of(model=MIXTRAL, tp=2, ep=2, balance=Balance(capacity_factor=1.0)),
    "biased": plan_of(
        model=DEEPSEEK, dp_shard=4, ep=4, balance=Balance(kind="bias", bias_rate=0.05)
    ),
}


def losses(plan: Plan, oracle: OracleStep, wrong: WrongMixture | None = None) -> torch.Tensor:
    model = build_decoder(plan, oracle.before, wrong, routing=oracle.routing)
    with torch.no_grad():
        return token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)


@pytest.mark.parametrize("name", PLANS)
def test_every_mistake_of_a_mixture_shows_in_the_losses(name: str) -> None:
    plan = shrink(PLANS[name], precision="fp64")
    oracle = run_oracle(plan, 2)[-1]
    right = losses(plan, oracle)
    tried: dict[str, float] = {}
    with torch.no_grad():
        for variant in expert_variants(plan, oracle):
            model = variant.build(plan, oracle)
            found = token_losses(plan, model, global_batch(plan, 1), 1)
            assert bool(found.isfinite().all()), variant.finding.description
            assert variant.finding.tensor.endswith(".mlp")
            tried[variant.finding.description] = float((found - right).norm() / right.norm())
    ends = ("of ep 0 make does not come back", "those of the last rank first")
    assert all(any(one.endswith(end) for one in tried) for end in ends)
    assert any("room" in one for one in tried) == (name == "dropping")
    assert ("biases take no part in the choice of experts" in tried) == (name == "biased")
    # Biases this small may send no token elsewhere, and a room this large may drop none.
    sure = {s: change for s, change in tried.items() if "bias" not in s and "drop" not in s}
    assert len(sure) > 6
    assert {s for s, change in sure.items() if change < 1e-7} == set()


def test_a_mixture_without_a_mistake_gives_the_losses_of_one_device() -> None:
    plan = shrink(PLANS["dropping"], precision="fp64")
    (oracle,) = run_oracle(plan, 1)
    torch.testing.assert_close(losses(plan, oracle, WrongMixture(plan)), losses(plan, oracle))
    in_order = WrongMixture(plan, order=lambda slots, _: slots)
    torch.testing.assert_close(losses(plan, oracle, in_order), losses(plan, oracle))


def test_a_dense_model_makes_no_mistakes_of_experts() -> None:
    plan = shrink(plan_of(model=GPT2), precision="fp64")
    assert list(expert_variants(plan, run_oracle(plan, 1)[0])) == []
