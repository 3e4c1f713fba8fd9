"""8-bit numbers by a table of all of them: the nearest entry, of two the one whose code is even.

The table is the definition of e4m3: a code of exponent bits e and mantissa bits m is
(1 + m / 8) 2^(e - 7), and m / 8 x 2^-6 where e is 0; the last code is no number (Micikevicius et
al., 2022, table 1). Scales are doubled and halved until they fit.

Shape suffixes: R rows, C columns, N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.core.plan import Precision

TABLE = torch.tensor(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1],
    dtype=torch.float64,
)
"""The numbers of the codes 0 to 126."""

UNROUNDED = ("attention.q_down", "attention.kv_down")
"""Layers whose products are those of whole numbers."""


def fp8_block_of(precision: Precision) -> int:
    """Return how many numbers share a scale; 0 where there are no 8-bit numbers."""
    return precision.fp8_block if precision.is_fp8 else 0


def fp8_product(x_NI: torch.Tensor, weight_OI: torch.Tensor, block: int) -> torch.Tensor:
    """Return Q(x) Q(W)^T, whose gradients are Q(dy) Q(W) and Q(dy)^T Q(x)."""
    y_NO: torch.Tensor = _Product.apply(x_NI, weight_OI, block)
    return y_NO


class _Product(torch.autograd.Function):
    """A product of rounded numbers."""

    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, block: int) -> torch.Tensor:
        """Return the product."""
        rounded = nearest_rows(x_NI, block), nearest_squares(weight_OI, block)
        ctx.save_for_backward(*rounded)
        ctx.block = block
        return rounded[0] @ rounded[1].T

    @staticmethod
    def backward(ctx: Any, dy_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return both gradients."""
        x_NI, weight_OI = ctx.saved_tensors
        dy_NO = nearest_rows(dy_NO, ctx.block)
        return dy_NO @ weight_OI, dy_NO.T @ x_NI, None


def nearest_rows(x_RC: torch.Tensor, block: int) -> torch.Tensor:
    """Return rows in 8 bits, a scale for each `block` numbers."""
    parts = [_nearest(x_RC[:, at : at + block]) for at in range(0, x_RC.shape[1], block)]
    return torch.cat(parts, dim=1)


def nearest_squares(x_RC: torch.Tensor, block: int) -> torch.Tensor:
    """Return a matrix in 8 bits, a scale for each square."""
    bands: list[torch.Tensor] = []
    for at in range(0, x_RC.shape[0], block):
        band = x_RC[at : at + block]
        # A square is one row of as many numbers.
        squares = [band[:, to : to + block] for to in range(0, x_RC.shape[1], block)]
        flat = [_nearest(one.reshape(1, -1)).reshape(one.shape) for one in squares]
        bands.append(torch.cat(flat, dim=1))
    return torch.cat(bands)


def _nearest(tiles_RK: torch.Tensor) -> torch.Tensor:
    """Return tiles, one in each row, in 8 bits."""
    largest = tiles_RK.abs().max(dim=1, keepdim=True).values
    scale = torch.ones_like(largest)
    while bool((too_large := largest > TABLE[-1] * scale).any()):
        scale = torch.where(too_large, 2 * scale, scale)
    while bool((fits := (largest > 0) & (largest <= TABLE[-1] * scale / 2)).any()):
        scale = torch.where(fits, scale / 2, scale)
    size = (tiles_RK / scale).abs()
    above = torch.searchsorted(TABLE, size.contiguous()).clamp(1, len(TABLE) - 1)
    middle = (TABLE[above - 1] + TABLE[above]) / 2
    even = torch.where(above % 2 == 0, above, above - 1)
    code = torch.where(size > middle, above, torch.where(size < middle, above - 1, even))
    return torch.sign(tiles_RK) * TABLE[code] * scale
