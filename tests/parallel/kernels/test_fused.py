"""Kernels with a backward by hand against the plain operations and autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.models.operations import Operations
from echelon.models.rotary import rotary_tables
from echelon.parallel.kernels.fused import LayerNorm, RMSNorm, Rotate, SwiGLU
from tests.parallel.buckets import matrix, store_of
from tests.parallel.layouts import NANO

PLAIN = Operations()
Compute = Callable[[torch.Tensor], torch.Tensor]


def random(*shape: int, seed: int = 9) -> torch.Tensor:
    """Return random float64 values."""
    return matrix(*shape, seed=seed).detach()


def compare(kernel: Compute, plain: Compute, x: torch.Tensor) -> None:
    """Assert that output and input gradient are equal, and that x is left alone."""
    before = x.clone()
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for compute in (kernel, plain):
        one = x.detach().requires_grad_()
        y = compute(one)
        y.backward(random(*y.shape, seed=3))
        assert one.grad is not None
        results.append((y.detach(), one.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(7, 12), (1, 12), (3, 2, 4, 12)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    weight = matrix(12)
    store = store_of({"w": weight})
    compare(
        lambda x: RMSNorm.apply(x, weight, 1e-5, store),
        lambda x: PLAIN.norm(x, weight, None, 1e-5),
        random(*shape),
    )
    assert weight.grad is not None
    gradient = store.buckets[0].slots[0].gradient
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-12, atol=1e-13)


def test_rms_norm_of_heads_inside_of_a_wider_tensor() -> None:
    weight = matrix(4)
    store = store_of({"w": weight})
    compare(
        lambda x: RMSNorm.apply(x.split((3, 2), dim=2)[1], weight, 1e-5, store),
        lambda x: PLAIN.head_norm(x.split((3, 2), dim=2)[1], weight, 1e-5),
        random(6, 2, 5, 4),
    )


def test_the_norm_of_nothing_is_nothing() -> None:
    weight = matrix(12)
    store = store_of({"w": weight})
    compare(
        lambda x: RMSNorm.apply(x, weight, 1e-5, store),
        lambda x: PLAIN.norm(x, weight, None, 1e-5),
        torch.zeros(2, 12, dtype=torch.float64),
    )


def test_layer_norm() -> None:
    weight, bias = matrix(12), matrix(12, seed=1)
    store = store_of({"norm.w": weight, "norm.b": bias})
    compare(
        lambda x: LayerNorm.apply(x, (weight, bias), 1e-5, store),
        lambda x: PLAIN.norm(x, weight, bias, 1e-5),
        random(7, 12),
    )
    for slot, parameter in zip(store.buckets[0].slots, (weight, bias), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(slot.gradient, parameter.grad, rtol=1e-12, atol=1e-13)


def test_swiglu() -> None:
    compare(SwiGLU.apply, lambda x: PLAIN.gate(x, "silu"), random(7, 12) * 4)


@pytest.mark.parametrize("strided", [False, True])
def test_rotate(strided: bool) -> None:
    cos, sin = rotary_tables(NANO, torch.arange(6), torch.float64)

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.split((3, 2), dim=2)[1] if strided else x

    compare(
        lambda x: Rotate.apply(part(x), cos[:, None, None], sin[:, None, None]),
        lambda x: PLAIN.rotate(part(x), cos, sin),
        random(6, 2, 5, 4),
    )
