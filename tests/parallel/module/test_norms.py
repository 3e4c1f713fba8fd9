"""Norms that are the formula are computed in fewer passes; others are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from echelon.parallel.module.norms import shorten_norms

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


class OtherRMSNorm(nn.Module):
    """Subtracts the mean, whatever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def values(norm: nn.Module, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the output of a norm, and its gradients."""
    x = X.to(dtype).requires_grad_()
    y = norm(x)
    weight = norm.get_parameter("weight")
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight])]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_norm_of_transformers_keeps_its_values(kind: type[nn.Module]) -> None:
    own = kind(8, eps=1e-5)
    nn.init.normal_(own.get_parameter("weight"))
    short = copy.deepcopy(own)
    assert shorten_norms([short]) == [short]
    for mine, theirs in zip(values(short), values(own), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        short(X.clone().requires_grad_())
    assert [one.numel() for one in kept] == [X.numel(), 8, X.numel() // 8]


def test_other_dtypes_are_left_to_the_layer() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        own = LlamaRMSNorm(8)
        short = copy.deepcopy(own)
        shorten_norms([short])
        for mine, theirs in zip(
            values(short.to(dtype), dtype), values(own.to(dtype), dtype), strict=True
        ):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", [lambda: GemmaRMSNorm(8), OtherRMSNorm, lambda: nn.RMSNorm(8)])
def test_what_is_not_the_formula_is_left_alone(make: type[nn.Module]) -> None:
    norm = make()
    assert shorten_norms([norm]) == []
    assert "forward" not in vars(norm)


def test_its_backward_can_be_differentiated_and_a_copy_is_a_plain_layer() -> None:
    own = LlamaRMSNorm(8)
    short = copy.deepcopy(own)
    shorten_norms([short])
    slopes: list[torch.Tensor] = []
    for norm in (own, short):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(norm(x).pow(3).sum(), [x], create_graph=True)
        slopes.extend(torch.autograd.grad(slope.square().sum(), [x, norm.weight]))
    for theirs, mine in zip(slopes[:2], slopes[2:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(copy.deepcopy(short)(X), own(X))
