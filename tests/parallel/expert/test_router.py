"""The losses of a router on a toy: a stream of tokens that want the same experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.experts import AuxiliaryScope, Balance
from echelon.core.plan import Precision
from echelon.models.moe import MixtureOfExperts
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.expert.balance import LayerLoad
from echelon.parallel.expert.router import RouterLinear
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.expert.toy import EIGHT, Toy
from tests.parallel.layouts import MIXTRAL, plan_of

SCOPES: tuple[AuxiliaryScope, ...] = ("global", "sequence", "microbatch")


@pytest.mark.system("S36")
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


@pytest.mark.system("S36")
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", SCOPES)
def test_the_gradient_of_the_auxiliary_loss_lowers_the_skew(scope: Any, router: Any) -> None:
    balance = Balance(kind="aux", aux_coefficient=1.0, aux_over=scope)
    toy = Toy(replace(EIGHT, router=router), balance)
    loads: list[LayerLoad] = []
    for _ in range(100):
        loads.append(toy.step()[1])
        toy.parallel.router.balancer.update()
        toy.weight_ED.sub_(toy.gradient(), alpha=0.1)
    assert loads[0].imbalance > 2
    assert loads[-1].imbalance < 1.3
    assert loads[-1].aux_loss < loads[0].aux_loss


def test_a_z_loss_is_the_mean_square_of_the_log_sum_of_exponentials() -> None:
    toy = Toy(EIGHT, Balance(z_coefficient=0.25))
    _, load = toy.step()
    logits_nE = (toy.x_nD @ toy.weight_ED.t()).detach().requires_grad_()
    wanted = 0.25 * logits_nE.logsumexp(-1).square().mean()
    assert load.z_loss == pytest.approx(float(wanted.detach()), rel=1e-13)
    wanted.backward()
    assert logits_nE.grad is not None
    torch.testing.assert_close(toy.gradient(), logits_nE.grad.t() @ toy.x_nD.detach())


def test_a_gradient_in_bf16_is_rounded_once() -> None:
    precision = Precision(parameters="bf16", gradients="bf16")
    plan = plan_of(model=MIXTRAL, precision=precision)
    model = apply_plan(plan, rank_groups(plan, Recorder(0, NoEvents())), torch.device("cpu"))
    weight = cast(MixtureOfExperts, model.stages[0].layers["0"].mlp).router.weight
    generator = torch.Generator().manual_seed(6)
    x_nD = torch.randn(1000, plan.model.hidden, generator=generator).bfloat16().requires_grad_()
    model.store.start_step()
    model.store.start_backward(last=False)
    logits_nE = RouterLinear.apply(x_nD, weight, model.store)
    dy_nE = torch.randn(logits_nE.shape, generator=generator)
    logits_nE.backward(dy_nE)
    slots = {id(slot.parameter): slot for bucket in model.buckets for slot in bucket.slots}
    got = slots[id(weight)].gradient
    wanted = dy_nE.double().t() @ x_nD.detach().double()
    assert got.dtype == torch.bfloat16
    # Half of the distance of two neighbours in bf16; sums of 1000 in float32 lose less than 1e-2.
    torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8, atol=1e-2)
