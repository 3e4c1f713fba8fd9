"""The mixture of experts on one device, against a loop over tokens."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import ModelShape
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block, Decoder
from echelon.models.moe import Expert, MixtureOfExperts, RoutingNotes, mixture_reference
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.parallel.one_device import decoder, make_rows, random_values

SHAPES = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK}


def last_mixture(shape: ModelShape) -> tuple[MixtureOfExperts, TokenBatch, torch.Tensor]:
    """Return the mixture of the last block with random weights, a batch, and a stream for it."""
    plan = plan_of(model=shape, microbatches=3)
    model: Decoder = decoder(plan, random_values(plan))
    block = model.layers[str(shape.layers - 1)]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, MixtureOfExperts)
    batch = make_rows(plan, 0).batch(0)
    generator = torch.Generator().manual_seed(5)
    x_ND = torch.randn(len(batch.tokens_N), shape.hidden, dtype=torch.float64, generator=generator)
    return block.mlp, batch, x_ND


def swiglu(expert: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    one = cast("Expert", expert)
    inner = torch.nn.functional.silu(one.gate.weight @ x) * (one.up.weight @ x)
    return one.down.weight @ inner


@pytest.mark.parametrize("factor", [None, 0.75])
@pytest.mark.parametrize("name", SHAPES)
def test_each_token_gets_the_weighted_sum_of_its_experts(name: str, factor: float | None) -> None:
    """One that is dropped adds nothing, and the weights of the others do not change."""
    mixture, batch, x_ND = last_mixture(SHAPES[name])
    notes = RoutingNotes(balance=Balance(capacity_factor=factor))
    y_ND = mixture_reference(x_ND, mixture, batch, notes)
    routed = notes.routed[mixture.layer]
    for n, x in enumerate(x_ND):
        wanted = torch.zeros_like(x)
        for k, expert in enumerate(routed.chosen_NK[n].tolist()):
            if routed.kept_NK[n, k]:
                gate = routed.gates_NK[n, k]
                wanted = wanted + gate * swiglu(mixture.experts[str(expert)], x)
        if hasattr(mixture, "shared"):
            wanted = wanted + swiglu(mixture.shared, x)
        torch.testing.assert_close(y_ND[n], wanted, rtol=1e-12, atol=1e-13)
    assert bool(routed.kept_NK.all()) == (factor is None)


def test_a_token_without_any_expert_passes_unchanged() -> None:
    """With no shared expert either, its mixture is zero: the residual stream goes on as it is."""
    mixture, batch, x_ND = last_mixture(MIXTRAL)
    notes = RoutingNotes(balance=Balance(capacity_factor=0.25, route="one"))
    y_ND = mixture_reference(x_ND, mixture, batch, notes)
    alone_N = ~notes.routed[mixture.layer].kept_NK.any(-1)
    # Room for ceil(0.25 x 8 x 2 / 8) = 1 token of each of the 3 sequences.
    assert int(alone_N.sum()) == len(x_ND) - 3
    assert not y_ND[alone_N].any()
    assert bool(y_ND[~alone_N].any(-1).all())


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    mixture, batch, x_ND = last_mixture(MIXTRAL)
    y_ND = mixture_reference(x_ND, mixture, batch, RoutingNotes(balance=Balance(route="one")))
    y_ND.square().sum().backward()
    for number, expert in mixture.experts.items():
        for weight in expert.parameters():
            assert weight.grad is not None
            assert bool(weight.grad.any()) == (int(number) < 2)
