"""Weight gradients of a module's linear layers in a pipeline, put off where a schedule says so.

The layer stays what it is; only its forward goes through a function whose backward gives the input
gradient at once, and the weight gradient to the store. Where a schedule splits the backward, W
computes it later; elsewhere it is added to the bucket at once, microbatch by microbatch, with no
tensor in between. That holds for
`torch.nn.Linear` and the `Conv1D` of transformers themselves. Layers of classes derived from them,
and all other parameters (norms, embeddings), have their weight gradient in B, and W adds it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from echelon.parallel.gradients import GradientStore
from echelon.parallel.module.tensor.layers import SplitLinear

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


class DeferredLinear(torch.autograd.Function):
    """A linear layer whose weight and bias gradients go to a store; `rows` are input features."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: bool,
        store: GradientStore,
    ) -> torch.Tensor:
        """Return [..., O] for x [..., I]; the weight is [O, I], or [I, O] where `rows` says so."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.rows, ctx.store = weight, bias, rows, store
        return functional.linear(x, weight.t() if rows else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx; put off dW = dy^T x and db."""
        (x,) = ctx.saved_tensors
        store: GradientStore = ctx.store
        weight: torch.Tensor = ctx.weight
        bias: torch.Tensor | None = ctx.bias
        dx = dy @ (weight.t() if ctx.rows else weight) if ctx.needs_input_grad[0] else None
        # Alone: with its place in the graph it would keep the input of the stage until W.
        x_NI = x.detach().reshape(-1, x.shape[-1])
        dy_NO = dy.reshape(-1, dy.shape[-1]).contiguous()
        if weight.requires_grad:
            pair = (x_NI, dy_NO) if ctx.rows else (dy_NO, x_NI)
            store.add_matmul([weight], *pair)
        if bias is not None and bias.requires_grad:
            store.defer(partial(_add_bias, store, bias, dy_NO))
            store.run_deferred()
        return dx, None, None, None, None


def _add_bias(store: GradientStore, bias: torch.Tensor, dy_NO: torch.Tensor) -> None:
    store.add(bias, dy_NO.sum(0))


def defer_weights(modules: Iterable[nn.Module], store: GradientStore) -> list[nn.Module]:
    """Put off the weight gradients of all linear layers among `modules`; return these layers."""
    found: list[nn.Module] = []
    for module in modules:
        kind = type(module)
        rows = (kind.__module__, kind.__name__) == _CONV1D
        weight = getattr(module, "weight", None)
        trained = isinstance(weight, nn.Parameter) and weight.requires_grad
        if trained and isinstance(module.forward, SplitLinear):
            cut = module.forward
            cut.product = partial(_product, module, cut.product, cut.transposed, store)
            found.append(module)
            continue
        if (kind is nn.Linear or rows) and trained and "forward" not in vars(module):
            run = partial(_forward, module, module.forward, rows, store)
            setattr(module, "forward", run)  # noqa: B010 - of this one, not of its class
            found.append(module)
    return found


def _product(
    module: nn.Module,
    run: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    rows: bool,
    store: GradientStore,
    x: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return run(x, bias)
    y: Any = DeferredLinear.apply(x, module.weight, bias, rows, store)
    return y


def _forward(
    module: nn.Module,
    run: Callable[[torch.Tensor], torch.Tensor],
    rows: bool,
    store: GradientStore,
    x: torch.Tensor,
) -> torch.Tensor:
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return run(x)
    y: Any = DeferredLinear.apply(x, module.weight, module.bias, rows, store)
    return y
