# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of a module's linear layers: written into buckets at once, or put off.

Autograd makes a tensor for each gradient, which is copied into its bucket and thrown away. Here the
product goes into the bucket at once, and what autograd carries to the parameter is a view of it. So
everything else stays as it is: hooks of the parameter, sums of several uses, `torch.autograd.grad`.

In a pipeline the forward of a layer goes through a function whose backward gives the input gradient
at once, and the weight gradient to the store. Where a schedule splits the backward, W computes it
later; elsewhere it is added to the bucket at once, microbatch by microbatch, with no tensor in
between.

Both hold for `torch.nn.Linear`, the `Conv1D` of transformers, and, without a pipeline, for both
where tensor ranks cut them. Layers of classes derived from them, and all other parameters, are left
alone: W adds their weight gradients up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from echelon.parallel.module.forwards.own_forward import OwnForward, is_plain_call
from echelon.parallel.module.tensor.layers import SplitLinear
from echelon.parallel.storage.gradients import GradientStore

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


LinearProduct = Callable[[Any, torch.Tensor, torch.Tensor | None, bool], torch.Tensor | None]
"""(x, weight, bias, rows) -> the product; None where the layer computes it as its class says."""


class GradientPlaces(Protocol):
    """Whoever lends memory for gradients."""

    def place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return memory for the gradient of a parameter, if this backward may write there."""
        ...


class LinearIntoBucket(torch.autograd.Function):
    """A linear layer whose weight gradient is written to a place; `rows` are input features."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: bool,
        places: weakref.ref[GradientPlaces],
    ) -> torch.Tensor:
        """Return [..., O] for x [..., I]; the weight is [O, I], or [I, O] where `rows` says so."""
        ctx.save_for_backward(x, weight)
        # A parameter is known by identity, and what was saved may come back as another object.
        ctx.parameter, ctx.rows, ctx.places = weight, rows, places
        return functional.linear(x, weight.t() if rows else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx, dW = dy^T x and db."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dx = dy @ (weight.t() if ctx.rows else weight) if wants_x else None
        x_NI, dy_NO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dweight = None
        if wants_weight:
            left, right = (x_NI, dy_NO) if ctx.rows else (dy_NO, x_NI)
            owner: GradientPlaces | None = ctx.places()
            # A backward that is itself differentiated needs the product in its graph.
            lends = owner is not None and not torch.is_grad_enabled()
            place = owner.place(ctx.parameter) if lends and owner is not None else None
            dweight = torch.mm(left.t(), right, out=place)
        return dx, dweight, dy_NO.sum(0) if wants_bias else None, None, None


class _LinearForward(OwnForward):
    """The forward of one linear layer."""

    def __init__(self, module: nn.Module, product: LinearProduct, *, rows: bool) -> None:
        super().__init__(module)
        self._product, self._rows = product, rows

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module, y = self.module, None
        if len(args) == 1 and not kwargs:
            y = self._product(args[0], module.weight, module.bias, self._rows)
        return self.of_class(*args, **kwargs) if y is None else y


class _SplitProduct:
    """The product of one linear layer that tensor ranks cut."""

    def __init__(self, cut: SplitLinear, product: LinearProduct) -> None:
        self._module: Any = cut.module
        self._rows, self._own, self._product = cut.transposed, cut.product, product

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = self._product(x, self._module.weight, bias, self._rows)
        return self._own(x, bias) if y is None else y


def layers_of(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Return the modules whose own parameters are all among `parameters`."""
    mine = {id(one) for one in parameters}
    return [
        module
        for module in model.modules()
        if all(id(one) in mine for one in module.parameters(recurse=False))
    ]


def write_into_buckets(modules: Iterable[nn.Module], places: GradientPlaces) -> list[nn.Module]:
    """Let linear layers among `modules` write their weight gradients to places; return them."""
    return _replace(modules, partial(_into_bucket, weakref.ref(places)))


def defer_weights(modules: Iterable[nn.Module], store: GradientStore) -> list[nn.Module]:
    """Put off the weight gradients of all linear layers among `modules`; return these layers."""
    return _replace(modules, partial(_deferred, weakref.ref(store)))


def _replace(modules: Iterable[nn.Module], product: LinearProduct) -> list[nn.Module]:
    found: list[nn.Module] = []
    for module, rows in trained_linears(modules):
        if isinstance(module.forward, SplitLinear):
            module.forward.product = _SplitProduct(module.forward, product)
        else:
            cast("Any", module).forward = _LinearForward(module, product, rows=rows)
        found.append(module)
    return found


def _into_bucket(
    places: weakref.ref[GradientPlaces],
    x: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: bool,
) -> torch.Tensor | None:
    """Return a product whose weight gradient may be written to a bucket."""
    if not (torch.is_grad_enabled() and weight.requires_grad and is_plain_call(x)):
        return None
    y: Any = LinearIntoBucket.apply(x, weight, bias, rows, places)
    return y


def _deferred(
    store_of: weakref.ref[GradientStore],
    x: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: bool,
) -> torch.Tensor | None:
    """Return a product whose gradients a store takes: all of them are its own."""
    store = store_of()
    if store is None or not (torch.is_grad_enabled() and store.holds(weight) and is_plain_call(x)):
        return None
    if bias is not None and bias.requires_grad and not store.holds(bias):
        return None
    y: Any = DeferredLinear.apply(x, weight, bias, rows, store)
    return y


def trained_linears(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the linear layers whose product may be another, and whether weights are [I, O]."""
    for module in modules:
        kind = type(module)
        rows = (kind.__module__, kind.__name__) == _CONV1D
        weight = getattr(module, "weight", None)
        plain = (kind is nn.Linear or rows) and "forward" not in vars(module)
        trained = isinstance(weight, nn.Parameter) and weight.requires_grad
        if trained and (plain or isinstance(module.forward, SplitLinear)):
            yield module, rows


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
