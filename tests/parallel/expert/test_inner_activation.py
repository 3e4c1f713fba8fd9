"""The activation of experts by hand: outputs and gradients are those of autograd."""

from __future__ import annotations

import pytest
import torch

from echelon.core.model_shape import Experts
from echelon.core.piece_sizes import PROOF_PIECES, TRAINING_PIECES, PieceSizes
from echelon.models.moe import Expert
from echelon.parallel.expert.inner_activation import InnerActivation

R, F = 23, 6


def by_autograd(
    experts: Experts, gate_up: torch.Tensor, gates: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the weighted activation, and the gradients of gate and up and of the weights."""
    expert = Expert(2 * F, experts).double()
    with torch.no_grad():
        # So that gate and up are what is given.
        expert.gate.weight.copy_(torch.eye(2 * F)[:F])
        expert.up.weight.copy_(torch.eye(2 * F)[F:])
    gate_up, gates = gate_up.clone().requires_grad_(), gates.clone().requires_grad_()
    y = expert.inner(gate_up) * gates[:, None]
    return (y.detach(), *torch.autograd.grad(y, [gate_up, gates], dy))


@pytest.mark.parametrize("pieces", [TRAINING_PIECES, PROOF_PIECES], ids=["whole", "cut"])
@pytest.mark.parametrize("limit", [None, 0.7, 7.0])
def test_outputs_and_gradients_are_those_of_autograd(
    limit: float | None, pieces: PieceSizes
) -> None:
    experts = Experts(num_experts=4, top_k=2, ffn=F, limit=limit, alpha=1.4)
    activation = InnerActivation(experts=experts, pieces=pieces, provider="plain")
    generator = torch.Generator().manual_seed(5)
    gate_up = torch.randn(R, 2 * F, generator=generator, dtype=torch.float64)
    gates = torch.rand(R, generator=generator, dtype=torch.float64)
    dy = torch.randn(R, F, generator=generator, dtype=torch.float64)
    wanted = by_autograd(experts, gate_up, gates, dy)
    before = gate_up.clone()
    y = activation.forward(gate_up, gates)
    dgates = torch.empty_like(gates)
    again, dgate_up = activation.backward(dy, gate_up, gates, dgates)
    assert torch.equal(gate_up, before)
    torch.testing.assert_close(again, y, rtol=1e-14, atol=1e-14)
    for found, right in zip((y, dgate_up, dgates), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-13)
    if limit is not None and limit < 1:
        beyond = torch.cat([gate_up[:, :F] > limit, gate_up[:, F:].abs() > limit], dim=1)
        assert 0 < int(beyond.sum()) < beyond.numel()
        assert not dgate_up[beyond].any()


def test_bf16_is_rounded_once() -> None:
    experts = Experts(num_experts=4, top_k=2, ffn=F, limit=0.7)
    activation = InnerActivation(experts=experts, pieces=PROOF_PIECES, provider="plain")
    generator = torch.Generator().manual_seed(6)
    gate_up = torch.randn(R, 2 * F, generator=generator).bfloat16()
    gates = torch.rand(R, generator=generator)
    dy = torch.randn(R, F, generator=generator).bfloat16()
    wanted = by_autograd(experts, *(one.double() for one in (gate_up, gates, dy)))
    dgates = torch.empty_like(gates)
    y, dgate_up = activation.backward(dy, gate_up, gates, dgates)
    assert torch.equal(y, activation.forward(gate_up, gates))
    for found, right in zip((y, dgate_up), wanted, strict=False):
        assert found.dtype == torch.bfloat16
        # Half of the distance of two neighbours in bf16, and what float32 loses before.
        torch.testing.assert_close(found.double(), right, rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(dgates.double(), wanted[2], rtol=1e-5, atol=1e-5)
