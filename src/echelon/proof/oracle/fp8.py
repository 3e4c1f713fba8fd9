# SPDX-License-Identifier: Apache-2.0
"""8-bit numbers on one device, written from the definition alone: linear layers, and int8 weights.

A number x becomes the nearest multiple of its step, of two the even multiple. In a tile with the
scale s, x / s lies in [2^e, 2^(e+1)): the step is 2^(e-3) s, and 2^-9 s below 2^-6 s, where e4m3
has no smaller exponents. s is the least power of two with which no number of the tile is above
448 s. Tiles are `block` numbers of a row of the input and of the gradient, squares of the weight.
A gradient may be rounded to e5m2: there the step is 2^(e-2) s, and 2^-16 s below 2^-14 s; the
largest is 57344 s.

Where a whole tensor has a scale, it is the least power of two with which no number of that tensor
was out of range in the last steps; that of a weight, with which none of it is. Layers that read the
same input share scales, as do all experts of a layer. What is out of range now becomes the largest
number. Before there is a step to look back on, tiles have scales.

No number is cast to 8 bits here, and no scale is found by bits: nothing is shared with what ranks
compute with (`parallel/kernels/fp8.py`). In the precision of a plan the loss is multiplied by a
factor in each run (`proof/claims/tolerance.py`); the gradient is rounded as if it were not, so that
what runs differ by is the rounding of the precision, as a plan's is.

Products of 8-bit numbers have few digits: a number may lie in the very middle between two 8-bit
numbers, but for the order in which a sum was added up. Float64 is rounded to float32 first, where
that order leaves no trace.

Of weights that are gathered as int8 a block is so many neighbours of a row. Its step is its largest
number over 127, and each number becomes the nearest multiple of the step, of two the even one; a
block of zeros stays as it is. Rounded are all matrices but those of routers and the table of
learned positions. What is not finite makes its whole block so. Gradients are those of the rounded
matrix, and the optimizer changes the one that is not rounded. Nothing is shared with
`parallel/storage/buckets.py`.

Shape suffixes: R rows, C columns, N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.core.plan import Precision
from echelon.models.decoder import Decoder
from echelon.models.modules import EmptyLinear
from echelon.models.precision import widened


@dataclass(frozen=True, slots=True)
class Format:
    """Say which numbers a format has: its largest, its least exponent, bits after the first."""

    largest: float
    least_exponent: int
    digits: int


E4M3 = Format(448.0, -6, 3)
E5M2 = Format(57344.0, -14, 2)
LARGEST = E4M3.largest
_LEAST_SCALE = 2.0**-126  # of a tile
_MOST_SCALE = 2.0**127  # of a tile
WHOLE = ("q_down", "kv_down")
"""Layers that lead down to the narrow vectors of latent attention multiply as ever."""


@dataclass(frozen=True, slots=True)
class TensorMaxima:
    """Hold the largest numbers of the inputs and the gradients of groups of layers, by step."""

    steps: tuple[Mapping[str, float], ...] = ()

    def after(self, found: Mapping[str, float], num_steps: int) -> TensorMaxima:
        """Return what the next step looks back on; what is not finite is no news."""
        told = {name: most for name, most in found.items() if math.isfinite(most)}
        return TensorMaxima((*self.steps, told)[-num_steps:])

    def of(self, name: str) -> float:
        """Return the largest number of all the steps; 0 where nothing is known."""
        return max((step.get(name, 0.0) for step in self.steps), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rounding:
    """Say what the loss is multiplied by, and what scales look back on.

    In `found` it notes the largest numbers of this step.
    """

    factor: float = 1.0
    maxima: TensorMaxima = field(default_factory=TensorMaxima)
    found: dict[str, float] = field(default_factory=dict[str, float])

    def note(self, name: str, x: torch.Tensor) -> None:
        """Note the largest number of a tensor, or of a part of it."""
        most = float(x.abs().max()) if x.numel() else 0.0
        self.found[name] = max(self.found.get(name, 0.0), math.inf if math.isnan(most) else most)


def rounded_to_fp8(
    x_RC: torch.Tensor,
    block: int,
    *,
    square: bool = False,
    form: Format = E4M3,
) -> torch.Tensor:
    """Return what a matrix is in 8 bits, in at least float32."""
    x_RC = widened(x_RC)
    height = block if square else 1
    tiles = x_RC.unflatten(1, (-1, block)).unflatten(0, (-1, height))
    largest = tiles.abs().amax((1, 3), keepdim=True)
    rounded = _rounded(tiles, _scale(largest, form), form)
    return rounded.flatten(2, 3).flatten(0, 1)


def rounded_whole(x_RC: torch.Tensor, most: float, *, form: Format = E4M3) -> torch.Tensor:
    """Return what a matrix is in 8 bits by the scale of a tensor whose largest number is `most`."""
    x_RC = widened(x_RC)
    return _rounded(x_RC, _scale(torch.tensor(most, dtype=x_RC.dtype), form), form)


def _rounded(x: torch.Tensor, scale: torch.Tensor, form: Format) -> torch.Tensor:
    # Only a scale of steps before can leave numbers beyond the largest, and infinite ones are none.
    fitted = torch.where(torch.isinf(x), torch.nan, x / scale).clamp(-form.largest, form.largest)
    fitted = fitted.float().to(x.dtype)
    # The exponent of a number, no less than the least that the format has.
    exponent = torch.floor(torch.log2(fitted.abs().clamp(min=2.0**form.least_exponent)))
    # The logarithm of a number just below a power of two may come out as that power's.
    exponent = torch.where(torch.exp2(exponent) > fitted.abs(), exponent - 1, exponent)
    step = torch.exp2(exponent.clamp(min=form.least_exponent) - form.digits)
    return torch.round(fitted / step) * step * scale


def _scale(largest: torch.Tensor, form: Format) -> torch.Tensor:
    scale = torch.exp2(torch.ceil(torch.log2(largest / form.largest)))
    scale = torch.where(scale * form.largest < largest, scale * 2, scale)
    scale = torch.where(scale / 2 * form.largest >= largest, scale / 2, scale)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return scale.clamp(_LEAST_SCALE, _MOST_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Casts:
    """Cast what one layer multiplies: by the scales of tiles, or by those of its group."""

    precision: Precision
    rounding: Fp8Rounding
    group: str
    weights: Mapping[str, float]

    @property
    def _by_group(self) -> bool:
        return self.precision.has_tensor_scales and bool(self.rounding.maxima.steps)

    def input(self, x_NI: torch.Tensor) -> torch.Tensor:
        name = f"{self.group} input"
        self.rounding.note(name, x_NI)
        return self._rows(x_NI, name, E4M3)

    def gradient(self, dy_NO: torch.Tensor) -> torch.Tensor:
        unscaled_NO = widened(dy_NO) / self.rounding.factor
        name = f"{self.group} gradient"
        self.rounding.note(name, unscaled_NO)
        form = E5M2 if self.precision.fp8_gradients == "e5m2" else E4M3
        return self._rows(unscaled_NO, name, form) * self.rounding.factor

    def weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        if self._by_group:
            return rounded_whole(weight_OI, self.weights[self.group])
        return rounded_to_fp8(weight_OI, self.precision.fp8_block, square=True)

    def _rows(self, x: torch.Tensor, name: str, form: Format) -> torch.Tensor:
        rounding = self.rounding
        if self._by_group:
            return rounded_whole(x, rounding.maxima.of(name), form=form)
        return rounded_to_fp8(x, self.precision.fp8_block, form=form)


class _Fp8Product(torch.autograd.Function):
    """x W^T of rounded numbers; backward rounds the gradient, as if x and W were not rounded."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, casts: _Casts
    ) -> torch.Tensor:
        """Return the product, in the dtype of x."""
        rounded_NI = casts.input(x_NI)
        rounded_OI = casts.weight(weight_OI)
        ctx.save_for_backward(rounded_NI, rounded_OI)
        ctx.casts, ctx.dtype = casts, x_NI.dtype
        return (rounded_NI @ rounded_OI.t()).to(x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, dy_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        rounded_NI, rounded_OI = ctx.saved_tensors
        rounded_NO = ctx.casts.gradient(dy_NO)
        dx_NI, dw_OI = rounded_NO @ rounded_OI, rounded_NO.t() @ rounded_NI
        return dx_NI.to(ctx.dtype), dw_OI.to(ctx.dtype), None


def multiply_in_fp8(
    model: Decoder,
    values: Mapping[str, torch.Tensor],
    precision: Precision,
    rounding: Fp8Rounding,
) -> None:
    """Let the linear layers of a model, which has these values, multiply 8-bit numbers.

    Only where its plan says so.
    """
    if not precision.is_fp8:
        return
    dtype = next(model.parameters()).dtype
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, EmptyLinear) and name.rpartition(".")[2] not in WHOLE
    }
    weights: dict[str, float] = {}
    for name in layers:
        most = float(values[f"{name}.weight"].detach().to(dtype).abs().max())
        weights[_group(name)] = max(weights.get(_group(name), 0.0), most)
    for name, module in layers.items():
        casts = _Casts(precision=precision, rounding=rounding, group=_group(name), weights=weights)
        forward: Any = _Layer(module, casts)
        module.forward = forward


def _group(layer: str) -> str:
    """Return the name that layers share which read the same input, whatever expert they are of."""
    *parts, last = [part for i, part in enumerate(layer.split(".")) if i < 2 or not part.isdigit()]
    shared = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate, up", "up": "gate, up"}
    return ".".join([*parts, shared.get(last, last)])


class _Layer:
    """The forward pass of one layer."""

    def __init__(self, linear: EmptyLinear, casts: _Casts) -> None:
        self._linear, self._casts = linear, casts

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        y_NO: torch.Tensor = _Fp8Product.apply(x_NI, weight, self._casts)
        return y_NO if bias is None else y_NO + bias


STEPS = 127
"""Multiples of its step that the largest number of a block is."""
_AS_THEY_ARE = ("router.weight", "positions.weight")


def as_gathered(name: str, values: torch.Tensor, block: int) -> torch.Tensor:
    """Return what forward and backward take of a parameter; without a `block`, the parameter."""
    if not block or values.dim() < 2 or name.endswith(_AS_THEY_ARE):
        return values
    tiles = widened(values.detach()).unflatten(-1, (-1, block))
    step = tiles.abs().amax(-1, keepdim=True) / STEPS
    multiples = torch.where(step == 0, 0.0, (tiles / step).round())
    rounded = torch.where(step.isfinite(), multiples * step, torch.nan)
    return rounded.flatten(-2).to(values.dtype)
