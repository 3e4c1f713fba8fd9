# SPDX-License-Identifier: Apache-2.0
"""Kernels for bf16 and fp16: computed in float32 a few rows at a time, each result rounded once.

`fused.py` uses them where a tensor is that narrow. What is as large as the input is kept in its
dtype; float32 are only pieces of it (`row_chunks`), numbers per row, and the gradients of weights.

Shape suffixes: D width of the last dim, R rows of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as fn

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes

GELU_BACKWARD: Any = torch.ops.aten.gelu_backward.grad_input


def row_chunks(x: torch.Tensor, pieces: PieceSizes = TRAINING_PIECES) -> Iterator[slice]:
    """Yield slices that cut the first dim of x into pieces."""
    num_rows = x.shape[0]
    limit = pieces.row_elements if x.device.type == "cpu" else pieces.gpu_row_elements
    piece = max(1, limit * num_rows // max(1, x.numel()))
    for start in range(0, num_rows, piece):
        yield slice(start, min(start + piece, num_rows))


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, pieces: PieceSizes = TRAINING_PIECES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / rms(x) * weight, and the inverse rms in float32 ([..., 1])."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    weight_D = weight_D.float()
    for rows in row_chunks(x, pieces):
        norm = torch.linalg.vector_norm(x[rows], dim=-1, keepdim=True, dtype=torch.float32)
        torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps), out=inverse[rows])
        torch.mul(x[rows] * inverse[rows], weight_D, out=y[rows])
    return y, inverse


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    weight_D: torch.Tensor,
    pieces: PieceSizes = TRAINING_PIECES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx, and the gradient of the weight in float32."""
    width = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight_D = torch.zeros(width, dtype=torch.float32, device=x.device)
    weight_D = weight_D.float()
    for rows in row_chunks(x, pieces):
        # dx = inverse (dy w - x_hat mean(dy w x_hat)), where x_hat = x inverse.
        scaled = dy[rows] * inverse[rows]
        product_RD = (scaled * x[rows]).reshape(-1, width)
        dweight_D += product_RD.sum(0)
        pull = torch.mv(product_RD, weight_D).view(inverse[rows].shape)
        away = x[rows] * inverse[rows].square().mul_(pull).div_(-width)
        torch.addcmul(away, scaled, weight_D, out=dx[rows])
    return dx, dweight_D


def layer_norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    eps: float,
    pieces: PieceSizes = TRAINING_PIECES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalised x; its mean and inverse deviation in float32 ([..., 1])."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, inverse = (
        torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) for _ in range(2)
    )
    weight_D, bias_D = weight_D.float(), bias_D.float()
    for rows in row_chunks(x, pieces):
        y[rows], mean[rows], inverse[rows] = torch.native_layer_norm(
            x[rows].float(), (x.shape[-1],), weight_D, bias_D, eps
        )
    return y, mean, inverse


def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    pieces: PieceSizes = TRAINING_PIECES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, and the gradients of weight and bias in float32."""
    mean, inverse = statistics
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight_D, dbias_D = (
        torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device) for _ in range(2)
    )
    weight_D, bias_D = weight_D.float(), bias_D.float()
    for rows in row_chunks(x, pieces):
        dx[rows], more_dweight, more_dbias = torch.ops.aten.native_layer_norm_backward(
            dy[rows].float().contiguous(),
            x[rows].float(),
            (x.shape[-1],),
            mean[rows],
            inverse[rows],
            weight_D,
            bias_D,
            [True, True, True],
        )
        dweight_D += more_dweight
        dbias_D += more_dbias
    return dx, dweight_D, dbias_D


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient of gate and up, side by side.

    PyTorch's kernel of silu's slope computes in float32 inside; only products are rounded. The
    slope is multiplied first: dy up may overflow where gate is so small that the result does not.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    grad = torch.empty_like(gate_up)
    dgate, dup = grad.chunk(2, dim=-1)
    torch.mul(dy, fn.silu(gate), out=dup)
    torch.ops.aten.silu_backward.grad_input(dy, gate, grad_input=dgate)
    dgate.mul_(up)
    return grad


def geglu_backward(dy: torch.Tensor, gate_up: torch.Tensor, form: str) -> torch.Tensor:
    """Return the gradient of gate and up, side by side, where gelu has the `form` of PyTorch.

    As in `swiglu_backward`, the slope is computed in float32 and multiplied first.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    grad = torch.empty_like(gate_up)
    dgate, dup = grad.chunk(2, dim=-1)
    torch.mul(dy, fn.gelu(gate, approximate=form), out=dup)
    GELU_BACKWARD(dy, gate, approximate=form, grad_input=dgate)
    dgate.mul_(up)
    return grad
