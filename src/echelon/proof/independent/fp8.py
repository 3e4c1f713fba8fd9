# SPDX-License-Identifier: Apache-2.0
"""8-bit numbers by a table of all of them: the nearest entry, of two the one whose code is even.

A number of float64 is rounded to float32 first: the order of its sums decides nothing.

The tables are the definitions of e4m3 and e5m2: a code of exponent bits e and mantissa bits m is
(1 + m / 8) 2^(e - 7), and m / 8 x 2^-6 where e is 0, the last code being no number; in e5m2
(1 + m / 4) 2^(e - 15) and m / 4 x 2^-14, no numbers where all bits of e are set (Micikevicius et
al., 2022, table 1). Scales are doubled and halved until they fit.

A tensor of the whole batch has a scale that fits the largest number of the steps before; each
layer tells what it met. What does not fit now is cut off.

Shape suffixes: R rows, C columns, N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from echelon.core.plan import Precision

TABLE = torch.tensor(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1],
    dtype=torch.float64,
)
"""The numbers of the codes 0 to 126."""

TABLE_E5M2 = torch.tensor(
    [m / 4 * 2.0**-14 for m in range(4)]
    + [(1 + m / 4) * 2.0 ** (e - 15) for e in range(1, 31) for m in range(4)],
    dtype=torch.float64,
)
"""The numbers of the codes 0 to 123 of e5m2."""

UNROUNDED = ("attention.q_down", "attention.kv_down")
"""Layers whose products are those of whole numbers."""


Largest = Mapping[str, float]
"""The largest number that anything of a layer, or of several that read the same, was in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rules:
    """Say how a step rounds, and take down the largest numbers in it, in `now`."""

    block: int
    """Numbers that share a scale, in each step or in the first one."""
    whole: bool = False
    """Whether tensors have scales, once there is a step to look back on."""
    history: int = 1
    """Steps that are looked back on."""
    gradients: torch.Tensor = TABLE
    """The table of gradients."""
    past: tuple[Largest, ...] = ()
    """The largest numbers of those steps."""
    now: dict[str, float] = field(default_factory=dict[str, float])
    """The largest numbers of this step so far."""

    @classmethod
    def first(cls, precision: Precision) -> Fp8Rules | None:
        """Return those of the first step; None where there are no 8-bit numbers."""
        if not precision.is_fp8:
            return None
        return cls(
            block=precision.fp8_block,
            whole=precision.fp8_scales == "tensor",
            history=precision.fp8_history,
            gradients=TABLE_E5M2 if precision.fp8_gradients == "e5m2" else TABLE,
        )

    def next(self) -> Fp8Rules:
        """Return the rules of the step after this one."""
        seen = {name: most for name, most in self.now.items() if most < math.inf}
        return replace(self, past=(*self.past, seen)[-self.history :], now={})

    def rows(self, x_RC: torch.Tensor, name: str, table: torch.Tensor = TABLE) -> torch.Tensor:
        """Return rows in 8 bits that are the tensor `name`, or a part of it."""
        if x_RC.numel():
            largest = x_RC.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item()
            self.now[name] = max(self.now.get(name, 0.0), largest)
        if not (self.whole and self.past):
            return nearest_rows(x_RC, self.block, table)
        return _nearest_of(x_RC, max(step.get(name, 0.0) for step in self.past), table)

    def weight(self, weight_OI: torch.Tensor, largest: float) -> torch.Tensor:
        """Return a weight in 8 bits; `largest` is that of all weights that read the same."""
        if self.whole and self.past:
            return _nearest_of(weight_OI, largest, TABLE)
        return nearest_squares(weight_OI, self.block)


def layers_that_share(name: str) -> tuple[str, str]:
    """Return what layers of a block are called that share scales, and a pattern of their names."""
    owner, _, layer = name.rpartition(".")
    together = next((group for group in (("q", "k", "v"), ("gate", "up")) if layer in group), ())
    owner = re.sub(r"experts[.]\d+", "experts", owner)
    called = {"q": "qkv", "gate": "gate, up"}.get(together[0], "") if together else layer
    pattern = re.escape(owner).replace("experts", r"experts[.]\d+")
    return f"{owner}.{called}", rf"{pattern}[.]({'|'.join(together or (layer,))})[.]weight"


def fp8_product(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, rules: Fp8Rules, name: str, largest: float
) -> torch.Tensor:
    """Return Q(x) Q(W)^T, whose gradients are Q(dy) Q(W) and Q(dy)^T Q(x).

    `name` is that of the layers that read x, and the largest of their weights is `largest`.
    """
    y_NO: torch.Tensor = _Product.apply(x_NI, weight_OI, rules, name, largest)
    return y_NO


class _Product(torch.autograd.Function):
    """A product of rounded numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: torch.Tensor,
        weight_OI: torch.Tensor,
        rules: Fp8Rules,
        name: str,
        largest: float,
    ) -> torch.Tensor:
        """Return the product."""
        rounded = rules.rows(x_NI, f"{name} input"), rules.weight(weight_OI, largest)
        ctx.save_for_backward(*rounded)
        ctx.rules, ctx.name = rules, name
        return rounded[0] @ rounded[1].T

    @staticmethod
    def backward(ctx: Any, dy_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return both gradients."""
        x_NI, weight_OI = ctx.saved_tensors
        rules: Fp8Rules = ctx.rules
        dy_NO = rules.rows(dy_NO, f"{ctx.name} gradient", rules.gradients)
        return dy_NO @ weight_OI, dy_NO.T @ x_NI, None, None, None


def nearest_rows(x_RC: torch.Tensor, block: int, table: torch.Tensor = TABLE) -> torch.Tensor:
    """Return rows in 8 bits, a scale for each `block` numbers."""
    parts = [_nearest(x_RC[:, at : at + block], table) for at in range(0, x_RC.shape[1], block)]
    return torch.cat(parts, dim=1)


def nearest_squares(x_RC: torch.Tensor, block: int) -> torch.Tensor:
    """Return a matrix in 8 bits, a scale for each square."""
    bands: list[torch.Tensor] = []
    for at in range(0, x_RC.shape[0], block):
        band = x_RC[at : at + block]
        # A square is one row of as many numbers.
        squares = [band[:, to : to + block] for to in range(0, x_RC.shape[1], block)]
        flat = [_nearest(one.reshape(1, -1), TABLE).reshape(one.shape) for one in squares]
        bands.append(torch.cat(flat, dim=1))
    return torch.cat(bands)


def _nearest_of(x_RC: torch.Tensor, largest: float, table: torch.Tensor) -> torch.Tensor:
    """Return a matrix in 8 bits by the scale that fits a number; what is larger is cut off."""
    scale = fitting(torch.tensor([[largest]], dtype=torch.float64), table)
    return _by_table(x_RC, scale, table)


def _nearest(tiles_RK: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return tiles, one in each row, in 8 bits."""
    if not len(tiles_RK):
        return tiles_RK
    scale = fitting(tiles_RK.abs().max(dim=1, keepdim=True).values, table)
    return _by_table(tiles_RK, scale, table)


def fitting(largest: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two that bring numbers into a table; 1 for zeros."""
    # About where it fits already, or 1 of a tile of zeros.
    near = torch.exp2(torch.log2(largest / table[-1]).floor())
    scale = torch.where((near > 0) & torch.isfinite(near), near, torch.ones_like(largest))
    while bool((too_large := largest > table[-1] * scale).any()):
        scale = torch.where(too_large, 2 * scale, scale)
    while bool((fits := (largest > 0) & (largest <= table[-1] * scale / 2)).any()):
        scale = torch.where(fits, scale / 2, scale)
    return scale


def _by_table(x_RC: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    size = (x_RC / scale).abs().float().double()
    above = torch.searchsorted(table, size.contiguous()).clamp(1, len(table) - 1)
    middle = (table[above - 1] + table[above]) / 2
    even = torch.where(above % 2 == 0, above, above - 1)
    code = torch.where(size > middle, above, torch.where(size < middle, above - 1, even))
    cut = torch.where(torch.isfinite(x_RC), table[code], torch.nan)
    return torch.sign(x_RC) * cut * scale
