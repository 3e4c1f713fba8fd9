"""What evens the load, on a toy: a router, a stream of tokens that want the same experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from echelon.core.experts import AuxiliaryScope, Balance
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.moe import MixtureOfExperts
from echelon.models.routing import gates_of, scores_of
from echelon.parallel.expert import ExpertParallel
from echelon.parallel.expert.balance import LayerLoad
from echelon.parallel.expert.router import Routed, Tokens
from tests.parallel.expert_targets import mixture_of, mixture_plan
from tests.parallel.targets import Built, build

EIGHT = Experts(num_experts=8, top_k=2, ffn=4)
SCOPES: tuple[AuxiliaryScope, ...] = ("global", "sequence", "microbatch")


class Toy:
    """The router of one block on one rank, and tokens that lie near one direction."""

    def __init__(self, experts: Experts, balance: Balance) -> None:
        self.plan: Plan = mixture_plan(
            experts=experts, balance=balance, sequence_length=64, microbatch_sequences=2
        )

        class Place:
            rank, device, world_size = 0, torch.device("cpu"), 1

        self.built: Built = build(cast("RankContext", Place()), self.plan)
        mixture, parallel = mixture_of(self.built)
        self.mixture: MixtureOfExperts = mixture
        self.parallel: ExpertParallel = parallel
        generator = torch.Generator().manual_seed(1)
        width = self.plan.model.hidden
        common_D = torch.randn(width, dtype=torch.float64, generator=generator)
        noise_nD = torch.randn(128, width, dtype=torch.float64, generator=generator)
        self.x_nD = (2 * common_D + noise_nD).requires_grad_()

    @property
    def tokens(self) -> Tokens:
        rows = torch.arange(128)
        numbers = rows // 2 + 64 * (rows % 2)
        return Tokens(key_n=rows, number_n=numbers, num_sequences=2, length=64)

    @property
    def weight_ED(self) -> torch.Tensor:
        return self.mixture.router.weight.detach()

    def step(self) -> tuple[Routed, LayerLoad]:
        """Route the tokens once; the gradients of the losses are in the buckets then."""
        self.built.model.store.start_step()
        self.built.model.store.start_backward(last=True)
        self.parallel.balancer.start_step(1.0)
        routed = self.parallel.router.route(
            self.x_nD, self.mixture.router.weight, 0, self.tokens, train=True
        )
        routed.gates_nK.backward(torch.zeros_like(routed.gates_nK))
        return routed, self.parallel.balancer.finish()[0]

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the router's weight."""
        (shard,) = self.built.gradients()["layers.0.mlp.router.weight"]
        return shard.tensor


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", SCOPES)
def test_an_even_load_has_an_auxiliary_loss_of_one(scope: Any, router: Any, top_k: int) -> None:
    """Times the coefficient: E x sum of f P = 8 x 8 x 1/8 x 1/8."""
    balance = Balance(kind="aux", aux_coefficient=0.5, aux_over=scope, route="even")
    toy = Toy(replace(EIGHT, router=router, top_k=top_k), balance)
    toy.weight_ED.zero_()
    _, load = toy.step()
    assert load.aux_loss == pytest.approx(0.5, rel=1e-14)
    assert load.imbalance == 1
    assert float(toy.gradient().abs().max()) < 1e-16


@pytest.mark.parametrize("scope", SCOPES)
def test_all_at_one_expert_cost_as_many_times_more_as_there_are_experts(scope: Any) -> None:
    """Where the router is sure of it, too: f = P = 1, and E x f P = 8."""
    balance = Balance(kind="aux", aux_coefficient=1.0, aux_over=scope, route="one")
    toy = Toy(replace(EIGHT, top_k=1), balance)
    toy.x_nD = torch.ones_like(toy.x_nD).requires_grad_()
    toy.weight_ED.zero_()
    toy.weight_ED[0] = 100.0
    _, load = toy.step()
    assert load.aux_loss == pytest.approx(8.0, rel=1e-12)
    assert load.imbalance == 8


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", SCOPES)
def test_the_gradient_of_the_auxiliary_loss_lowers_the_skew(scope: Any, router: Any) -> None:
    balance = Balance(kind="aux", aux_coefficient=1.0, aux_over=scope)
    toy = Toy(replace(EIGHT, router=router), balance)
    loads: list[LayerLoad] = []
    for _ in range(100):
        loads.append(toy.step()[1])
        toy.parallel.balancer.update()
        toy.weight_ED.sub_(toy.gradient(), alpha=0.1)
    assert loads[0].imbalance > 2
    assert loads[-1].imbalance < 1.3
    assert loads[-1].aux_loss < loads[0].aux_loss


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_bias_evens_a_skewed_stream_and_leaves_gates_alone(router: Any) -> None:
    experts = replace(EIGHT, router=router, router_bias=True, renormalise=False)
    toy = Toy(experts, Balance(kind="bias", bias_rate=0.01))
    before = toy.weight_ED.clone()
    imbalance: list[float] = []
    for _ in range(150):
        bias_E = toy.parallel.balancer.biases[0].clone()
        routed, load = toy.step()
        toy.parallel.balancer.update()
        imbalance.append(load.imbalance)
        moved_E = toy.parallel.balancer.biases[0] - bias_E
        away_E = torch.sign(32.0 - torch.tensor(load.counts, dtype=torch.float64))
        torch.testing.assert_close(moved_E, 0.01 * away_E)
        scores_nE = scores_of(toy.x_nD @ before.t(), experts)
        gates_nK = gates_of(scores_nE, routed.chosen_nK, experts)
        torch.testing.assert_close(routed.gates_nK, gates_nK)
    assert imbalance[0] > 2
    assert imbalance[-1] < 1.3
    assert torch.equal(before, toy.weight_ED)
    assert not toy.gradient().any()


def test_a_z_loss_is_the_mean_square_of_the_log_sum_of_exponentials() -> None:
    toy = Toy(EIGHT, Balance(z_coefficient=0.25))
    _, load = toy.step()
    logits_nE = (toy.x_nD @ toy.weight_ED.t()).detach().requires_grad_()
    wanted = 0.25 * logits_nE.logsumexp(-1).square().mean()
    assert load.z_loss == pytest.approx(float(wanted.detach()), rel=1e-13)
    wanted.backward()
    assert logits_nE.grad is not None
    torch.testing.assert_close(toy.gradient(), logits_nE.grad.t() @ toy.x_nD.detach())
