"""Norms that are the formula are computed in fewer passes; others are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from echelon.parallel.module.forwards.norms import shorten_norms

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


class OddRMSNorm(nn.Module):
    """A norm that is the formula, unless it is told to be another one."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps, self.how = 1e-6, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.square()
        if self.how == "outside":  # of the square root
            return x / (square.mean(-1, keepdim=True).sqrt() + self.eps) * self.weight
        dims = {"positions": (-2, -1), "batch": (0, 2)}.get(self.how, (-1,))
        y = x * torch.rsqrt(square.mean(dims, keepdim=True) + self.eps)
        if self.how == "noisy" and self.training:
            return y * (self.weight + torch.rand_like(self.weight))
        if self.how == "fails":
            raise KeyError(self.how)
        return y * (self.weight + 1 if self.how == "offset" else self.weight)


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


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: GemmaRMSNorm(8), OtherRMSNorm, lambda: nn.RMSNorm(8)),
        *(partial(OddRMSNorm, how) for how in ("outside", "positions", "batch", "offset")),
        *(partial(OddRMSNorm, how) for how in ("fails", "noisy")),
        lambda: OddRMSNorm("noisy").eval(),
    ],
)
def test_what_is_not_the_formula_is_left_alone(make: Callable[[], nn.Module]) -> None:
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


class CountingRMSNorm(OddRMSNorm):
    """The formula, and the number of calls."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x."""
        self.num_calls += 1
        return super().forward(x)


def test_a_norm_that_does_more_than_compute_is_left_alone() -> None:
    norm = CountingRMSNorm()
    assert shorten_norms([norm]) == []
    assert norm.num_calls == 0
    norm(X)
    assert norm.num_calls == 1


def test_another_eps_is_that_of_the_next_call() -> None:
    own = LlamaRMSNorm(8)
    short = copy.deepcopy(own)
    assert shorten_norms([short]) == [short]
    for norm in (own, short):
        norm.variance_epsilon = 1.0
    assert torch.equal(short(X), own(X))


def test_each_layer_of_a_class_is_tried_and_no_hook_of_it_is_called() -> None:
    norms = [OddRMSNorm(), OddRMSNorm("offset"), OddRMSNorm()]
    called: list[nn.Module] = []
    for norm in norms:
        norm.register_forward_pre_hook(lambda module, _: called.append(module))
    weights = [norm.weight for norm in norms]
    assert shorten_norms(norms) == [norms[0], norms[2]]
    assert not called
    assert all(norm.weight is weight for norm, weight in zip(norms, weights, strict=True))
    assert all(norm.training for norm in norms)


def test_under_autocast_a_norm_is_as_precise_as_its_class() -> None:
    own = LlamaRMSNorm(64)
    short = copy.deepcopy(own)
    shorten_norms([short])
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    found: list[list[torch.Tensor]] = []
    for norm in (own, short):
        one = x.clone().requires_grad_()
        early = norm(one)
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(one)
            # A backward inside of it, of a forward outside.
            gradients = torch.autograd.grad(early.square().sum(), [one, norm.weight])
        found.append([y, *gradients, *torch.autograd.grad(y.square().sum(), [one, norm.weight])])
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_torch_func_and_forward_derivatives_take_the_norm_of_the_class() -> None:
    own = LlamaRMSNorm(8)
    short = copy.deepcopy(own)
    shorten_norms([short])

    def slopes(norm: nn.Module) -> list[torch.Tensor | None]:
        weights = {name: one.detach() for name, one in norm.named_parameters()}

        def loss(given: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(norm, given, (x,)).pow(3).sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X)["weight"]
        with forward_ad.dual_level():
            y = norm(forward_ad.make_dual(X, X.flip(0)))
            return [each, *forward_ad.unpack_dual(y)]

    for mine, theirs in zip(slopes(short), slopes(own), strict=True):
        torch.testing.assert_close(mine, theirs)
