"""Pieces that are one kernel each, as their formulas, against plain operations in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from echelon.core.choices.kernels import Kernels
from echelon.models.batch import TokenBatch
from echelon.models.decoder import BranchNorm
from echelon.models.modules import Weight
from echelon.models.operations import AttentionHeads, Operations
from echelon.models.rotary import rotary_tables
from echelon.parallel.context import ContextAttention
from echelon.parallel.kernels.piece_operators import (
    Branch,
    FusedHeads,
    FusedNorm,
    FusedRotate,
    FusedSwiGLU,
    HeadsKernel,
    NormKernel,
    RemadeNorm,
)
from echelon.parallel.operations import RankOperations
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.tensor import TensorSplit
from tests.parallel.buckets import alone, matrix, store_of
from tests.parallel.layouts import NANO, QWEN, plan_of

PLAIN = Operations()
EPS = 1e-5
EVERY = Kernels(provider="triton", fused=("norm", "residual", "rotary", "swiglu", "loss"))
Tensors = tuple[torch.Tensor, ...]


def random(*shape: int, seed: int = 9) -> torch.Tensor:
    """Return random float64 values."""
    return matrix(*shape, seed=seed).detach()


def compare(
    kernel: Callable[..., Tensors], plain: Callable[..., Tensors], *inputs: torch.Tensor
) -> None:
    """Assert that all outputs and gradients of inputs are equal, and that inputs are left alone."""
    before = [one.clone() for one in inputs]
    results: list[Tensors] = []
    for compute in (kernel, plain):
        given = [one.detach().requires_grad_() for one in inputs]
        made = compute(*given)
        seeds = [random(*one.shape, seed=3 + place) for place, one in enumerate(made)]
        torch.autograd.backward(made, seeds)
        gradients = [one.grad for one in given if one.grad is not None]
        assert len(gradients) == len(given)
        results.append((*(one.detach() for one in made), *gradients))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(one, other) for one, other in zip(inputs, before, strict=True))


def assert_stored(store: GradientStore, weights: tuple[torch.nn.Parameter, ...]) -> None:
    """Assert that the store has the gradients that autograd gave the weights."""
    for slot, weight in zip(store.buckets[0].slots, weights, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(slot.gradient, weight.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(7, 12), (1, 12), (3, 2, 4, 12), (600, 12)])
def test_norm(shape: tuple[int, ...]) -> None:
    weight = matrix(12)
    store = store_of({"w": weight})
    kernel = NormKernel(weight=weight, eps=EPS, provider="triton", store=store)
    compare(
        lambda x: (FusedNorm.apply(x, kernel),),
        lambda x: (PLAIN.norm(x, weight, None, EPS),),
        random(*shape),
    )
    assert_stored(store, (weight,))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_the_head_of_a_branch(adds: bool, again: bool) -> None:
    weight = matrix(12)
    store = store_of({"w": weight})
    kernel = NormKernel(weight=weight, eps=EPS, provider="triton", store=store)

    def fused(x: torch.Tensor, *added: torch.Tensor) -> Tensors:
        remade = RemadeNorm(kernel) if again else None
        stream, normed = Branch.apply(x, added[0] if adds else None, kernel, remade)
        if remade is not None:
            # As the layer does that reads it, before backward comes here.
            torch.testing.assert_close(remade.make(), normed.detach(), rtol=0.0, atol=0.0)
        return stream, normed

    def plain(x: torch.Tensor, *added: torch.Tensor) -> Tensors:
        stream = x + added[0] if adds else x * 1
        return stream, PLAIN.norm(stream, weight, None, EPS)

    compare(fused, plain, *(random(7, 12, seed=seed) for seed in range(1 + adds)))
    assert_stored(store, (weight,))


def test_swiglu() -> None:
    compare(
        lambda x: (FusedSwiGLU.apply(x, "triton"),),
        lambda x: (PLAIN.gate(x, "silu"),),
        random(7, 12) * 4,
    )


def test_rotate() -> None:
    cos, sin = rotary_tables(NANO, torch.arange(6), torch.float64)

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.split((3, 2), dim=2)[1]

    compare(
        lambda x: (FusedRotate.apply(part(x), cos, sin, "triton"),),
        lambda x: (PLAIN.rotate(part(x), cos, sin),),
        random(6, 2, 5, 4),
    )


@pytest.mark.parametrize("normed", [False, True])
def test_heads(normed: bool) -> None:
    weights = (matrix(4, seed=1), matrix(4, seed=2)) if normed else ()
    store = store_of({f"w{place}": one for place, one in enumerate(weights)} or {"w": matrix(1)})
    tables = rotary_tables(NANO, torch.arange(6), torch.float64)
    kernel = HeadsKernel(
        num_queries=4,
        num_keys=2,
        tables=tables,
        provider="triton",
        store=store,
        weights=weights,
        eps=EPS,
    )

    def plain(qkv: torch.Tensor) -> Tensors:
        q, k, v = qkv.split((4, 2, 2), dim=2)
        if weights:
            q, k = (PLAIN.head_norm(x, w, EPS) for x, w in zip((q, k), weights, strict=True))
        return PLAIN.rotate(q, *tables), PLAIN.rotate(k, *tables), v

    compare(lambda qkv: FusedHeads.apply(qkv, kernel), plain, random(6, 2, 8, 4))
    if weights:
        assert_stored(store, weights)


def operations(kernels: Kernels, store: GradientStore) -> RankOperations:
    """Return the operations of one rank alone."""
    split = TensorSplit(group=alone(), sequence_parallel=False, store=store, kernels=kernels)
    context = ContextAttention(plan_of(), alone(), alone(), store)
    return RankOperations(split, NANO.vocab, context)


@pytest.mark.parametrize(
    "kernels",
    [
        Kernels(),
        EVERY,
        replace(EVERY, fused=("norm",)),
        replace(EVERY, fused=("rotary",)),
        replace(EVERY, fused=("norm", "rotary")),
    ],
    ids=lambda one: "-".join(one.fused) or "plain",
)
def test_a_rank_may_have_some_of_them(kernels: Kernels) -> None:
    weights = {name: matrix(4, seed=seed) for seed, name in enumerate(("q_norm", "k_norm"))}
    stream = matrix(12, seed=5)
    store = store_of({**weights, "norm": stream})
    ops = operations(kernels, store)
    norms = (Weight(4), Weight(4))
    for one, weight in zip(norms, weights.values(), strict=True):
        one.weight = weight
    heads = AttentionHeads(shape=QWEN, num_queries=4, num_keys=2, norms=norms)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    batch = TokenBatch.from_rows(tokens, tokens, torch.arange(2), step=0, seed=0)
    norm = BranchNorm(replace(NANO, hidden=12), ops, again=True)
    norm.weight = stream
    plain = BranchNorm(replace(NANO, hidden=12), PLAIN, again=True)
    plain.weight = stream
    qkv, x, y = random(3, 2, 8, 4), random(6, 12, seed=1), random(6, 12, seed=2)
    compare(
        lambda one: ops.heads(one, heads, batch), lambda one: PLAIN.heads(one, heads, batch), qkv
    )
    compare(norm, plain, x, y)
    compare(lambda one: (ops.gate(one, "silu"),), lambda one: (PLAIN.gate(one, "silu"),), x)
    assert_stored(store, (*weights.values(), stream))


def test_an_operator_is_asked_of_nothing_plain() -> None:
    """Which kernel is asked for is what the plan says, piece by piece."""
    kernels = Kernels(provider="compiled", fused=("norm", "swiglu"))
    asked = [kernels.of(piece) for piece in EVERY.fused]
    assert asked == ["compiled", "plain", "plain", "compiled", "plain"]
