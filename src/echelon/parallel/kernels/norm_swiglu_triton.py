# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and SwiGLU as one kernel each way, in Triton.

The norm has the sum of the residual stream in it. Forward reads x (and what is added to it) and
writes the sum and its norm; backward reads the gradient of the norm, the sum, and the gradient that
came around the branch, and writes the gradient of the stream. A program of backward takes several
rows and gives one partial sum of the gradient of the weight: no atomic addition, so that results
are reproducible.

SwiGLU reads gate and up and writes the product; backward reads its gradient, gate and up, and
writes both gradients. With weights of rows (of experts), a program of backward goes through a whole
row, gives the output again, for the gradient of the next matrix, and the sum that is the weight's
gradient.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Shazeer, "GLU Variants
Improve Transformer", 2020; Hsu et al., "Liger Kernel", 2024, section 3.2 (the inverse rms kept, the
input read once more in backward).
Shape suffixes: R rows, D width, P programs, F inner width; gate and up lie side by side, [R, 2 F].
"""

# Triton reads what a parameter is annotated with, in a module that no type checker sees.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.piece_formulas import rows_and_sums

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_THREAD_ELEMENTS = 16
"""Elements of a row that a thread has in registers."""

TILE_ELEMENTS = 4096
"""Elements of the rows that a program of backward reads at a time: of narrow rows several, or too
little would be on its way from memory."""

_COLUMNS = 1024
"""Columns that a program takes at a time."""

_BLOCK: Any = tl.constexpr(_COLUMNS)
_WIDE: Any = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def norm_kernel(
    x_RD,
    added_RD,
    weight_D,
    sum_RD,
    y_RD,
    inverse_R,
    width,
    x_stride,
    added_stride,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_RD + row * x_stride + column, mask=inside, other=0.0)
    wide = inverse_R.dtype.element_ty
    if ADDS:
        added = tl.load(added_RD + row * added_stride + column, mask=inside, other=0.0)
        x = (x.to(wide) + added.to(wide)).to(sum_RD.dtype.element_ty)
        tl.store(sum_RD + row * width + column, x, mask=inside)
    x = x.to(wide)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(inverse_R + row, inverse)
    weight = tl.load(weight_D + column, mask=inside, other=0.0).to(wide)
    y = x * inverse * weight
    tl.store(y_RD + row * width + column, y.to(y_RD.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    dy_RD,
    x_RD,
    inverse_R,
    weight_D,
    around_RD,
    dx_RD,
    sums_PD,
    num_rows,
    width,
    dy_stride,
    x_stride,
    around_stride,
    rows_each,
    AROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = inverse_R.dtype.element_ty
    weight = tl.load(weight_D + column, mask=inside, other=0.0).to(wide)[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=wide)
    first = program * rows_each
    last = tl.minimum(first + rows_each, num_rows)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        there = (rows < last)[:, None] & inside[None, :]
        row = rows[:, None]
        dy = tl.load(dy_RD + row * dy_stride + column[None, :], mask=there, other=0.0).to(wide)
        x = tl.load(x_RD + row * x_stride + column[None, :], mask=there, other=0.0).to(wide)
        inverse = tl.load(inverse_R + rows, mask=rows < last, other=0.0)[:, None]
        x_hat = x * inverse
        total += dy * x_hat
        scaled = dy * weight
        pull = tl.sum(scaled * x_hat, axis=1)[:, None] / width
        dx = inverse * (scaled - x_hat * pull)
        if AROUND:
            around = around_RD + row * around_stride + column[None, :]
            dx += tl.load(around, mask=there, other=0.0).to(wide)
        place = dx_RD + row * width + column[None, :]
        tl.store(place, dx.to(dx_RD.dtype.element_ty), mask=there)
    tl.store(sums_PD + program * width + column, tl.sum(total, axis=0), mask=inside)


def norm(
    x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x, and the inverse rms [R, 1]."""
    _, y_RD, inverse = _forward(x_RD, None, weight_D, eps)
    return y_RD, inverse


def add_norm(
    x_RD: torch.Tensor, y_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x + y, its norm, and the inverse rms [R, 1]."""
    return _forward(x_RD, y_RD, weight_D, eps)


def _forward(
    x_RD: torch.Tensor, added_RD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width = x_RD.shape
    x_RD = rows_together(x_RD)
    added = x_RD if added_RD is None else rows_together(added_RD)
    made = {"dtype": x_RD.dtype, "device": x_RD.device}
    y_RD = torch.empty((num_rows, width), **made)
    sum_RD = y_RD if added_RD is None else torch.empty((num_rows, width), **made)
    inverse = torch.empty((num_rows, 1), dtype=at_least_fp32(x_RD.dtype), device=x_RD.device)
    sizes = (width, x_RD.stride(0), added.stride(0), eps)
    block, warps = row_shape(width)
    if num_rows:
        norm_kernel[(num_rows,)](
            *(x_RD, added, weight_D, sum_RD, y_RD, inverse, *sizes),
            ADDS=added_RD is not None,
            BLOCK=block,
            num_warps=warps,
        )
    return sum_RD, y_RD, inverse


def norm_backward(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    inverse: torch.Tensor,
    weight_D: torch.Tensor,
    around_RD: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx, with what came around the norm added, and partial sums [P, D] of dweight."""
    num_rows, width = x_RD.shape
    dy_RD, x_RD = rows_together(dy_RD), rows_together(x_RD)
    around = dy_RD if around_RD is None else rows_together(around_RD)
    dx_RD = torch.empty((num_rows, width), dtype=x_RD.dtype, device=x_RD.device)
    rows_each, num_sums = rows_and_sums(num_rows)
    sums_PD = inverse.new_empty((num_sums, width))
    strides = (dy_RD.stride(0), x_RD.stride(0), around.stride(0))
    sizes = (num_rows, width, *strides, rows_each)
    rows, block, warps = tile_shape(width)
    if num_rows:
        norm_backward_kernel[(num_sums,)](
            *(dy_RD, x_RD, inverse, weight_D, around, dx_RD, sums_PD, *sizes),
            AROUND=around_RD is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return dx_RD, sums_PD


def rows_together(x_RD: torch.Tensor) -> torch.Tensor:
    """Return x with the elements of each row side by side; rows may lie apart."""
    return x_RD if x_RD.stride(-1) == 1 else x_RD.contiguous()


def row_shape(width: int) -> tuple[int, int]:
    """Return the elements of a block that holds a row, a power of two, and warps for it."""
    block = 1 << max(0, width - 1).bit_length()
    return block, max(1, min(32, block // (32 * _THREAD_ELEMENTS)))


def tile_shape(width: int) -> tuple[int, int, int]:
    """Return how many rows a program of backward reads at a time, and of them as `row_shape`."""
    block, _ = row_shape(width)
    rows = max(1, TILE_ELEMENTS // block)
    return rows, block, max(1, min(32, rows * block // (32 * _THREAD_ELEMENTS)))


@triton.jit
def _sigmoid(x):
    # No exponential of a large number: it would be infinite.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def swiglu_kernel(
    gate_up, weights_R, y_RF, width, row_stride, WIDE: tl.constexpr, WEIGHTED: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0).to(WIDE)
    y = gate * _sigmoid(gate) * up
    if WEIGHTED:
        y = y * tl.load(weights_R + row).to(WIDE)
    tl.store(y_RF + row * width + column, y.to(y_RF.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    dy_RF, gate_up, dgate_up, width, dy_stride, row_stride, WIDE: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = column < width
    dy = tl.load(dy_RF + row * dy_stride + column, mask=inside, other=0.0).to(WIDE)
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0).to(WIDE)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    # d silu / d gate = sigmoid + silu (1 - sigmoid)
    dgate = dy * (sigmoid + silu * (1.0 - sigmoid)) * up
    place = dgate_up + row * 2 * width + column
    tl.store(place, dgate.to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(place + width, (dy * silu).to(dgate_up.dtype.element_ty), mask=inside)


@triton.jit
def weighted_swiglu_backward_kernel(
    dy_RF,
    gate_up,
    weights_R,
    y_RF,
    dgate_up,
    dweights_R,
    width,
    dy_stride,
    row_stride,
    WIDE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_R + row).to(WIDE)
    total = tl.zeros([_BLOCK], dtype=WIDE)
    for first in range(0, width, _BLOCK):
        column = first + tl.arange(0, _BLOCK)
        inside = column < width
        dy = tl.load(dy_RF + row * dy_stride + column, mask=inside, other=0.0).to(WIDE)
        gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(WIDE)
        up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0).to(WIDE)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        y = silu * up
        total += dy * y
        tl.store(y_RF + row * width + column, (y * weight).to(y_RF.dtype.element_ty), mask=inside)
        inner = dy * weight
        dgate = inner * (sigmoid + silu * (1.0 - sigmoid)) * up
        place = dgate_up + row * 2 * width + column
        tl.store(place, dgate.to(dgate_up.dtype.element_ty), mask=inside)
        tl.store(place + width, (inner * silu).to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(dweights_R + row, tl.sum(total, axis=0).to(dweights_R.dtype.element_ty))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up."""
    return _swiglu(gate_up, None)


def weighted_swiglu(gate_up: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up times the weight of the row."""
    return _swiglu(gate_up, weights_R)


def _swiglu(gate_up: torch.Tensor, weights_R: torch.Tensor | None) -> torch.Tensor:
    gate_up = rows_together(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y_RF = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        swiglu_kernel[(num_rows, -(-width // _COLUMNS))](
            *(gate_up, gate_up if weights_R is None else weights_R, y_RF),
            *(width, gate_up.stride(0)),
            WIDE=_wide(gate_up),
            WEIGHTED=weights_R is not None,
        )
    return y_RF


def swiglu_backward(dy_RF: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient of gate and up, side by side."""
    dy_RF, gate_up = rows_together(dy_RF), rows_together(gate_up)
    num_rows, width = dy_RF.shape
    dgate_up = torch.empty((num_rows, 2 * width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        swiglu_backward_kernel[(num_rows, -(-width // _COLUMNS))](
            *(dy_RF, gate_up, dgate_up, width, dy_RF.stride(0), gate_up.stride(0)),
            WIDE=_wide(gate_up),
        )
    return dgate_up


def weighted_swiglu_backward(
    dy_RF: torch.Tensor, gate_up: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output again, and the gradients of gate and up, and of the weights."""
    dy_RF, gate_up = rows_together(dy_RF), rows_together(gate_up)
    num_rows, width = dy_RF.shape
    y_RF = torch.empty((num_rows, width), dtype=dy_RF.dtype, device=dy_RF.device)
    dgate_up = torch.empty((num_rows, 2 * width), dtype=gate_up.dtype, device=gate_up.device)
    weights_R = weights_R.contiguous()
    dweights_R = torch.empty_like(weights_R)
    if num_rows:
        weighted_swiglu_backward_kernel[(num_rows,)](
            *(dy_RF, gate_up, weights_R, y_RF, dgate_up, dweights_R),
            *(width, dy_RF.stride(0), gate_up.stride(0)),
            WIDE=_wide(gate_up),
        )
    return y_RF, dgate_up, dweights_R


def _wide(x: torch.Tensor) -> Any:
    return _WIDE[at_least_fp32(x.dtype)]
