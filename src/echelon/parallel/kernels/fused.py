# SPDX-License-Identifier: Apache-2.0
"""Operations with their backward written by hand: fewer passes over memory, less kept for backward.

Each equals the plain formula in `models/operations.py` (the tests compare both in float64). None
talks to other ranks. Weight gradients go to a GradientStore, which knows a parameter by identity:
so a parameter stays on `ctx`, for what comes back from `saved_tensors` may be another object.
Tensors narrower than float32 take the way of `low_precision.py`. SwiGLU with a weight for each row
(of experts) is computed in at least float32 and rounded once.

Shape suffixes: N tokens, R rows, D hidden, F inner width, E = head_dim / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.choices.kernels import KernelProvider
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.models.precision import LOW_PRECISION, at_least_fp32
from echelon.parallel.kernels import low_precision
from echelon.parallel.kernels.low_precision import GELU_BACKWARD, row_chunks
from echelon.parallel.kernels.piece_operators import PIECES
from echelon.parallel.storage.gradients import GradientStore


class RMSNorm(torch.autograd.Function):
    """Root-mean-square norm (Zhang and Sennrich, 2019) over the last dim."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        eps: float,
        store: GradientStore,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> torch.Tensor:
        """Return x / rms(x) * weight; keep x and the inverse rms."""
        ctx.weight, ctx.store, ctx.pieces = weight, store, pieces
        if x.dtype in LOW_PRECISION:
            y, inverse = low_precision.rms_norm(x, weight, eps, pieces)
            ctx.save_for_backward(x, inverse)
            return y
        mean_square = torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1]
        inverse = torch.rsqrt(mean_square + eps)
        ctx.save_for_backward(x, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx = inverse * (dy w - x_hat mean(dy w x_hat))."""
        x, inverse = ctx.saved_tensors
        weight: nn.Parameter = ctx.weight
        if x.dtype in LOW_PRECISION:
            dx, dweight = low_precision.rms_norm_backward(dy, x, inverse, weight, ctx.pieces)
            ctx.store.add(weight, dweight)
            return dx, None, None, None, None
        x_hat = x * inverse
        scaled = dy * weight
        pull = torch.linalg.vecdot(scaled, x_hat).unsqueeze(-1) / x.shape[-1]
        dweight = (dy * x_hat).reshape(-1, x.shape[-1]).sum(0)
        ctx.store.add(weight, dweight)
        dx = scaled.addcmul_(x_hat, pull, value=-1).mul_(inverse)
        return dx, None, None, None, None


class LayerNorm(torch.autograd.Function):
    """Layer norm (Ba et al., 2016) over the last dim, on PyTorch's own fused kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_and_bias: tuple[nn.Parameter, nn.Parameter],
        eps: float,
        store: GradientStore,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> torch.Tensor:
        """Return the normalised x; keep x, its mean and inverse deviation."""
        weight, bias = weight_and_bias
        if x.dtype in LOW_PRECISION:
            y, mean, inverse = low_precision.layer_norm(x, weight, bias, eps, pieces)
        else:
            y, mean, inverse = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps)
        ctx.save_for_backward(x, mean, inverse)
        ctx.weight, ctx.bias, ctx.store, ctx.pieces = weight, bias, store, pieces
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx; the gradients of weight and bias go to the store."""
        x, mean, inverse = ctx.saved_tensors
        weight: nn.Parameter = ctx.weight
        bias: nn.Parameter = ctx.bias
        if x.dtype in LOW_PRECISION:
            dx, dweight, dbias = low_precision.layer_norm_backward(
                dy, x, (mean, inverse), weight, bias, ctx.pieces
            )
        else:
            dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                dy.contiguous(), x, (x.shape[-1],), mean, inverse, weight, bias, [True, True, True]
            )
        ctx.store.add(weight, dweight)
        ctx.store.add(bias, dbias)
        return dx, None, None, None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer, 2020); keeps its input only and computes silu again."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, pieces: PieceSizes = TRAINING_PIECES
    ) -> torch.Tensor:
        """Return the product, [N, F], for gate and up side by side."""
        ctx.save_for_backward(gate_up)
        ctx.pieces = pieces
        gate, up = gate_up.chunk(2, dim=-1)
        return fn.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of gate and up, side by side."""
        (gate_up,) = ctx.saved_tensors
        if gate_up.dtype in LOW_PRECISION:
            return low_precision.swiglu_backward(dy, gate_up), None
        grad = torch.empty_like(gate_up)
        one = torch.ones((), dtype=dy.dtype, device=dy.device)
        for rows in row_chunks(gate_up, ctx.pieces):
            gate, up = gate_up[rows].chunk(2, dim=-1)
            dgate, dup = grad[rows].chunk(2, dim=-1)
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            torch.mul(dy[rows], silu, out=dup)
            # d silu / d gate = sigmoid + silu (1 - sigmoid) = silu + sigmoid (1 - silu)
            slope = torch.lerp(silu, one, sigmoid, out=silu)
            torch.mul(slope.mul_(up), dy[rows], out=dgate)
        return grad, None


class GeGLU(torch.autograd.Function):
    """gelu(gate) * up (Shazeer, 2020); keeps its input only and computes gelu again."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, form: str, pieces: PieceSizes = TRAINING_PIECES
    ) -> torch.Tensor:
        """Return the product, [N, F], for gate and up side by side; `form` is "tanh" or "none"."""
        ctx.save_for_backward(gate_up)
        ctx.form, ctx.pieces = form, pieces
        gate, up = gate_up.chunk(2, dim=-1)
        return fn.gelu(gate, approximate=form).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of gate and up, side by side."""
        (gate_up,) = ctx.saved_tensors
        if gate_up.dtype in LOW_PRECISION:
            return low_precision.geglu_backward(dy, gate_up, ctx.form), None, None
        grad = torch.empty_like(gate_up)
        for rows in row_chunks(gate_up, ctx.pieces):
            gate, up = gate_up[rows].chunk(2, dim=-1)
            dgate, dup = grad[rows].chunk(2, dim=-1)
            gelu = fn.gelu(gate, approximate=ctx.form)
            torch.mul(dy[rows], gelu, out=dup)
            inner = torch.mul(dy[rows], up)
            GELU_BACKWARD(inner, gate, approximate=ctx.form, grad_input=dgate)
        return grad, None, None


class Rotate(torch.autograd.Function):
    """Turn half-pairs by their position: the transpose of a rotation is the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> torch.Tensor:
        """Return x [T, B, heads, head_dim] turned by cos, sin [T, 1, 1, E]."""
        ctx.save_for_backward(cos, sin)
        ctx.pieces = pieces
        return rotate_half_pairs(x, cos, sin, pieces, direction=1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dy turned back."""
        cos, sin = ctx.saved_tensors
        turned = rotate_half_pairs(dy, cos, sin, ctx.pieces, direction=-1)
        return turned, None, None, None


def rotate_half_pairs(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pieces: PieceSizes = TRAINING_PIECES,
    *,
    direction: int,
) -> torch.Tensor:
    """Return x with its half-pairs turned forwards (1) or back (-1)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in row_chunks(x, pieces):
        # Both halves have the same cosine: one product over whole heads has longer inner loops.
        # A bf16 sum is rounded once: its first product stays in the dtype of the tables.
        into = out[rows] if out.dtype == cos.dtype else None
        product = torch.mul(x[rows], torch.cat((cos[rows], cos[rows]), dim=-1), out=into)
        first, second = x[rows].chunk(2, dim=-1)
        parts = zip(product.chunk(2, dim=-1), out[rows].chunk(2, dim=-1), strict=True)
        for (part, turned), other, sign in zip(
            parts, (second, first), (-direction, direction), strict=True
        ):
            torch.addcmul(part, other, sin[rows], value=sign, out=turned)
    return out


_SILU_BACKWARD: Any = torch.ops.aten.silu_backward.grad_input


def weighted_swiglu(
    gate_up: torch.Tensor,
    gates_R: torch.Tensor,
    pieces: PieceSizes = TRAINING_PIECES,
    *,
    provider: KernelProvider = "plain",
) -> torch.Tensor:
    """Return silu(gate) x up x the row's weight, [R, F], for gate and up side by side."""
    if provider != "plain":
        return PIECES.piece_swiglu(gate_up, gates_R, provider)
    y = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    wide = at_least_fp32(gate_up.dtype)
    for rows in row_chunks(gate_up, pieces):
        gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
        torch.mul(fn.silu(gate).mul_(up), gates_R[rows, None].to(wide), out=y[rows])
    return y


def weighted_swiglu_backward(
    dy: torch.Tensor,
    gate_up: torch.Tensor,
    gates_R: torch.Tensor,
    dgates_R: torch.Tensor,
    pieces: PieceSizes = TRAINING_PIECES,
    *,
    provider: KernelProvider = "plain",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output again and the gradient of gate and up; write that of the weights."""
    if provider != "plain":
        y, dgate_up, dweights_R = PIECES.piece_weighted_swiglu_backward(
            dy, gate_up, gates_R, provider
        )
        dgates_R.copy_(dweights_R)
        return y, dgate_up
    y, dgate_up = torch.empty_like(dy), torch.empty_like(gate_up)
    wide = at_least_fp32(gate_up.dtype)
    for rows in row_chunks(gate_up, pieces):
        gate, up = gate_up[rows].to(wide).chunk(2, dim=-1)
        dgate, dup = dgate_up[rows].chunk(2, dim=-1)
        weights, dy_wide = gates_R[rows, None].to(wide), dy[rows].to(wide)
        silu = fn.silu(gate)
        plain = silu * up
        dgates_R[rows] = torch.linalg.vecdot(dy_wide, plain)
        torch.mul(plain, weights, out=y[rows])
        inner = torch.mul(dy_wide, weights, out=plain)
        torch.mul(inner, silu, out=dup)
        _SILU_BACKWARD(inner.mul_(up), gate, grad_input=dgate)
    return y, dgate_up
