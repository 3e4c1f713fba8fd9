# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of a module's linear layers in a pipeline, put off where a schedule says so.

The layer stays what it is; only its forward goes through a function whose backward gives the input
gradient at once, and the weight gradient to the store. Where a schedule splits the backward, W
computes it later; elsewhere it is added to the bucket at once, microbatch by microbatch, with no
tensor in between. That holds for
`torch.nn.Linear` and the `Conv1D` of transformers themselves. Layers of classes derived from them,
and all other parameters (norms, embeddings), have their weight gradient in B, and W adds it up.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from echelon.parallel.gradients import GradientStore
from echelon.parallel.module.forwards.linear import trained_linears
from echelon.parallel.module.forwards.own_forward import OwnForward, is_plain_call
from echelon.parallel.module.tensor.layers import SplitLinear


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


class _DeferredForward(OwnForward):
    """The forward of one linear layer."""

    def __init__(self, module: nn.Module, store: GradientStore, *, rows: bool) -> None:
        super().__init__(module)
        self._store, self._rows = weakref.ref(store), rows

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self.module
        store = self._store()
        if len(args) == 1 and not kwargs and store is not None:
            x, weight, bias = args[0], module.weight, module.bias
            if _defers(x, weight, bias, store):
                y: Any = DeferredLinear.apply(x, weight, bias, self._rows, store)
                return y
        return self.of_class(*args, **kwargs)


class _DeferredProduct:
    """The product of one linear layer that tensor ranks cut."""

    def __init__(self, cut: SplitLinear, store: GradientStore) -> None:
        self._module: Any = cut.module
        self._rows, self._own, self._store = cut.transposed, cut.product, weakref.ref(store)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight, store = self._module.weight, self._store()
        if store is None or not _defers(x, weight, bias, store):
            return self._own(x, bias)
        y: Any = DeferredLinear.apply(x, weight, bias, self._rows, store)
        return y


def defer_weights(modules: Iterable[nn.Module], store: GradientStore) -> list[nn.Module]:
    """Put off the weight gradients of all linear layers among `modules`; return these layers."""
    found: list[nn.Module] = []
    for module, rows in trained_linears(modules):
        if isinstance(module.forward, SplitLinear):
            module.forward.product = _DeferredProduct(module.forward, store)
        else:
            cast("Any", module).forward = _DeferredForward(module, store, rows=rows)
        found.append(module)
    return found


def _defers(x: Any, weight: torch.Tensor, bias: torch.Tensor | None, store: GradientStore) -> bool:
    """Return whether a product has gradients that a store takes: all of them are its own."""
    return (
        torch.is_grad_enabled()
        and store.holds(weight)
        and (bias is None or not bias.requires_grad or store.holds(bias))
        and is_plain_call(x)
    )
