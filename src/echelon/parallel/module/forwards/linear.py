# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of a module's linear layers, written where the buckets are.

Autograd makes a tensor for each gradient, which is copied into its bucket and thrown away. Here the
product goes into the bucket at once, and what autograd carries to the parameter is a view of it. So
everything else stays as it is: hooks of the parameter, sums of several uses, `torch.autograd.grad`.

That holds for `torch.nn.Linear`, the `Conv1D` of transformers, and both where tensor ranks cut
them; classes derived from them, and layers with a forward of their own, are left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from echelon.parallel.module.forwards.own_forward import OwnForward, is_plain_call
from echelon.parallel.module.tensor.layers import SplitLinear

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


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

    def __init__(self, module: nn.Module, places: GradientPlaces, *, rows: bool) -> None:
        super().__init__(module)
        self._places, self._rows = weakref.ref(places), rows

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self.module
        if len(args) != 1 or kwargs or not _writes(args[0], module.weight):
            return self.of_class(*args, **kwargs)
        y: Any = LinearIntoBucket.apply(
            args[0], module.weight, module.bias, self._rows, self._places
        )
        return y


class _SplitProduct:
    """The product of one linear layer that tensor ranks cut."""

    def __init__(self, module: nn.Module, cut: SplitLinear, places: GradientPlaces) -> None:
        self._module, self._rows, self._own = module, cut.transposed, cut.product
        self._places = weakref.ref(places)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        module: Any = self._module
        if not _writes(x, module.weight):
            return self._own(x, bias)
        y: Any = LinearIntoBucket.apply(x, module.weight, bias, self._rows, self._places)
        return y


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
    found: list[nn.Module] = []
    for module, rows in trained_linears(modules):
        if isinstance(module.forward, SplitLinear):
            module.forward.product = _SplitProduct(module, module.forward, places)
        else:
            cast("Any", module).forward = _LinearForward(module, places, rows=rows)
        found.append(module)
    return found


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


def _writes(x: Any, weight: torch.Tensor) -> bool:
    """Return whether a product has a gradient whose place may be a bucket."""
    return torch.is_grad_enabled() and weight.requires_grad and is_plain_call(x)
