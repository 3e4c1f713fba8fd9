# SPDX-License-Identifier: Apache-2.0
"""SwiGLU as one kernel each way, in Triton; of experts with the weight of each row.

Forward reads gate and up and writes the product; backward reads its gradient, gate and up, and
writes both gradients. With weights of rows, a program of backward goes through a whole row, gives
the output again, for the gradient of the next matrix, and the sum that is the weight's gradient.

Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hsu et al., "Liger Kernel", 2024.
Shape suffixes: R rows, F inner width; gate and up lie side by side, [R, 2 F].
"""

# Triton reads what a parameter is annotated with, in a module that no type checker sees.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.norm_triton import rows_together

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_COLUMNS = 1024
"""Columns that a program takes at a time."""

_BLOCK: Any = tl.constexpr(_COLUMNS)
_WIDE: Any = {torch.float32: tl.float32, torch.float64: tl.float64}


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
    return _forward(gate_up, None)


def weighted_swiglu(gate_up: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up times the weight of the row."""
    return _forward(gate_up, weights_R)


def _forward(gate_up: torch.Tensor, weights_R: torch.Tensor | None) -> torch.Tensor:
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
