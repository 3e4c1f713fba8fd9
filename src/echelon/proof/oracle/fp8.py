"""Linear layers of 8-bit numbers on one device, written from the definition alone.

A number x becomes the nearest multiple of its step, of two the even multiple. In a tile with the
scale s, x / s lies in [2^e, 2^(e+1)): the step is 2^(e-3) s, and 2^-9 s below 2^-6 s, where e4m3
has no smaller exponents. s is the least power of two with which no number of the tile is above
448 s. Tiles are `block` numbers of a row of the input and of the gradient, squares of the weight.

No number is cast to 8 bits here, and no scale is found by bits: nothing is shared with what ranks
compute with (`parallel/kernels/fp8.py`). In the precision of a plan the loss is multiplied by a
factor in each run (`proof/claims/tolerance.py`); the gradient is rounded as if it were not, so that
what runs differ by is the rounding of the precision, as a plan's is.

Products of 8-bit numbers have few digits, so that a number may lie in the very middle between two
8-bit numbers, but for the order in which a sum was added up. Whoever
adds otherwise may round to the other side. Ties are noted, and any of them can be rounded to its
other side, as ranks may have done (`proof/claims/ties.py`).

Shape suffixes: R rows, C columns, N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.core.plan import Precision
from echelon.models.decoder import Decoder
from echelon.models.modules import EmptyLinear
from echelon.models.precision import widened

LARGEST = 448.0  # number of e4m3
_LEAST_EXPONENT = -6  # of two
_DIGITS = 3  # bits after the first
_LEAST_SCALE = 2.0**-126  # of a tile
_MOST_SCALE = 2.0**127  # of a tile
WHOLE = ("q_down", "kv_down")
"""Layers that lead down to the narrow vectors of latent attention multiply as ever."""


NEAR = 1e-10
"""How near to a tie, relative to itself, a number may be one but for the order of float64 sums."""

Tie = tuple[int, int, int]
"""A step, which of its roundings of a matrix, and which number of that."""


@dataclass(slots=True)
class TieNotes:
    """Say which ties are rounded to the other side than the even one; note all that there are."""

    flipped: Set[Tie] = frozenset()
    found: list[Tie] = field(default_factory=list[Tie])
    step: int = 0
    _matrices: int = 0

    def start_step(self, step: int) -> None:
        """Count the roundings of a step."""
        self.step, self._matrices = step, 0

    def flips(self, is_tie: torch.Tensor) -> torch.Tensor:
        """Note the ties of the next matrix; return which of its numbers are flipped."""
        number, self._matrices = self._matrices, self._matrices + 1
        flips = torch.zeros(is_tie.numel(), dtype=torch.bool)
        for place in is_tie.reshape(-1).nonzero().flatten().tolist():
            tie = self.step, number, place
            self.found.append(tie)
            flips[place] = tie in self.flipped
        return flips.view(is_tie.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rounding:
    """Say what the loss is multiplied by, and what becomes of ties."""

    factor: float = 1.0
    ties: TieNotes | None = None


def rounded_to_fp8(
    x_RC: torch.Tensor, block: int, *, square: bool = False, ties: TieNotes | None = None
) -> torch.Tensor:
    """Return what a matrix is in 8 bits, in at least float32."""
    x_RC = widened(x_RC)
    height = block if square else 1
    tiles = x_RC.unflatten(1, (-1, block)).unflatten(0, (-1, height))
    largest = tiles.abs().amax((1, 3), keepdim=True)
    scale = _scale(largest)
    fitted = tiles / scale
    # The exponent of a number, no less than the least that e4m3 has.
    exponent = torch.floor(torch.log2(fitted.abs().clamp(min=2.0**_LEAST_EXPONENT)))
    # The logarithm of a number just below a power of two may come out as that power's.
    exponent = torch.where(torch.exp2(exponent) > fitted.abs(), exponent - 1, exponent)
    step = torch.exp2(exponent.clamp(min=_LEAST_EXPONENT) - _DIGITS)
    steps = fitted / step
    nearest = torch.round(steps)
    if ties is not None:
        is_tie = (steps.abs() % 1 - 0.5).abs() <= NEAR * steps.abs()
        other = torch.floor(steps) + torch.ceil(steps) - nearest
        nearest = torch.where(ties.flips(is_tie), other, nearest)
    rounded = nearest * step * scale
    return rounded.flatten(2, 3).flatten(0, 1)


def _scale(largest: torch.Tensor) -> torch.Tensor:
    scale = torch.exp2(torch.ceil(torch.log2(largest / LARGEST)))
    scale = torch.where(scale * LARGEST < largest, scale * 2, scale)
    scale = torch.where(scale / 2 * LARGEST >= largest, scale / 2, scale)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return scale.clamp(_LEAST_SCALE, _MOST_SCALE)


class _Fp8Product(torch.autograd.Function):
    """x W^T of rounded numbers; backward rounds the gradient, as if x and W were not rounded."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, block: int, rounding: Fp8Rounding
    ) -> torch.Tensor:
        """Return the product, in the dtype of x."""
        rounded_NI = rounded_to_fp8(x_NI, block, ties=rounding.ties)
        rounded_OI = rounded_to_fp8(weight_OI, block, square=True, ties=rounding.ties)
        ctx.save_for_backward(rounded_NI, rounded_OI)
        ctx.block, ctx.rounding, ctx.dtype = block, rounding, x_NI.dtype
        return (rounded_NI @ rounded_OI.t()).to(x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, dy_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        rounded_NI, rounded_OI = ctx.saved_tensors
        rounding: Fp8Rounding = ctx.rounding
        unscaled_NO = widened(dy_NO) / rounding.factor
        rounded_NO = rounded_to_fp8(unscaled_NO, ctx.block, ties=rounding.ties) * rounding.factor
        dx_NI, dw_OI = rounded_NO @ rounded_OI, rounded_NO.t() @ rounded_NI
        return dx_NI.to(ctx.dtype), dw_OI.to(ctx.dtype), None, None


def multiply_in_fp8(model: Decoder, precision: Precision, rounding: Fp8Rounding) -> None:
    """Let the linear layers of a model multiply 8-bit numbers, where its plan says so."""
    if not precision.is_fp8:
        return
    for name, module in model.named_modules():
        if isinstance(module, EmptyLinear) and name.rpartition(".")[2] not in WHOLE:
            forward: Any = _Layer(module, precision.fp8_block, rounding)
            module.forward = forward


class _Layer:
    """The forward pass of one layer."""

    def __init__(self, linear: EmptyLinear, block: int, rounding: Fp8Rounding) -> None:
        self._linear, self._block, self._rounding = linear, block, rounding

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        y_NO: torch.Tensor = _Fp8Product.apply(x_NI, weight, self._block, self._rounding)
        return y_NO if bias is None else y_NO + bias
