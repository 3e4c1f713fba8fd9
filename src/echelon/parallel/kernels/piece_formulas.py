# SPDX-License-Identifier: Apache-2.0
"""The pieces between products as formulas: each in at least float32, each result rounded once.

They are read three times: a CPU computes them where a plan has kernels for GPUs, PyTorch's compiler
makes kernels of them, and the kernels in Triton are tested against them. None is the way of a run
with plain kernels (`fused.py`, `low_precision.py`), which works through few rows at a time.

The gradient of a norm's weight is a sum over rows. A kernel in Triton gives one partial sum for
each program, so that the order of all sums is one, whatever runs at the same time.

Shape suffixes: R rows, D width of a row, P partial sums, T positions, B sequences, h width of a
head, E = h / 2, F inner width, C tokens, V local vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from echelon.cost.bytes.piece_traffic import num_partial_sums, rows_of_partial_sum
from echelon.models.precision import at_least_fp32

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys, and the inverse root mean square of each head (empty without norms of heads)."""


def rows_and_sums(num_rows: int) -> tuple[int, int]:
    """Return the rows that one partial sum is of, and how many there are."""
    return int(rows_of_partial_sum(num_rows)), int(num_partial_sums(num_rows))


def partial_sums(values_RD: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """Return sums of the rows of values, [P, D], or one of all of them where it is `whole`."""
    if whole:
        return values_RD.sum(0, keepdim=True)
    num_rows = values_RD.shape[0]
    rows, num_sums = rows_and_sums(num_rows)
    padded = fn.pad(values_RD, (0, 0, 0, num_sums * rows - num_rows))
    return padded.view(-1, rows, values_RD.shape[1]).sum(1)


def norm(
    x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / rms(x) * weight, and the inverse rms [R, 1]."""
    wide_RD = x_RD.to(at_least_fp32(x_RD.dtype))
    inverse = torch.rsqrt(wide_RD.square().mean(-1, keepdim=True) + eps)
    return (wide_RD * inverse * weight_D.to(wide_RD.dtype)).to(x_RD.dtype), inverse


def add_norm(
    x_RD: torch.Tensor, y_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x + y, its norm, and the inverse rms [R, 1]; the norm is that of the rounded sum."""
    sum_RD = x_RD + y_RD
    return sum_RD, *norm(sum_RD, weight_D, eps)


def norm_backward(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    inverse: torch.Tensor,
    weight_D: torch.Tensor,
    around_RD: torch.Tensor | None,
    *,
    whole: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx, with the gradient that came around the norm added, and sums for the weight's."""
    wide = inverse.dtype
    dy_wide, x_hat = dy_RD.to(wide), x_RD.to(wide) * inverse
    scaled = dy_wide * weight_D.to(wide)
    dx = inverse * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
    if around_RD is not None:
        dx = dx + around_RD.to(wide)
    return dx.to(x_RD.dtype), partial_sums(dy_wide * x_hat, whole=whole)


def rotate(
    x_TBHh: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, direction: int
) -> torch.Tensor:
    """Return x with its half-pairs turned forwards (1) or back (-1)."""
    turned = _turned(x_TBHh.to(cos_TE.dtype), cos_TE, direction * sin_TE)
    return turned.to(x_TBHh.dtype).contiguous()


def _turned(x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_TE[:, None, None], sin_TE[:, None, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def heads(
    qk: torch.Tensor,
    num_queries: int,
    tables: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> Heads:
    """Return queries and keys, which lie side by side in qk [T, B, H + K, h], normed and turned."""
    cos_TE, sin_TE = tables
    x = qk.to(cos_TE.dtype)
    inverse = x.new_empty((0,))
    if weights is not None:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = x * inverse * _weight_of_heads(weights, num_queries, qk.shape[2], x.dtype)
    turned = _turned(x, cos_TE, sin_TE).to(qk.dtype)
    return (
        turned[:, :, :num_queries].contiguous(),
        turned[:, :, num_queries:].contiguous(),
        inverse,
    )


def _weight_of_heads(
    weights: tuple[torch.Tensor, torch.Tensor], num_queries: int, num_heads: int, wide: torch.dtype
) -> torch.Tensor:
    """Return the weights of the norm of each head, [H + K, h]."""
    q_h, k_h = (one.to(wide) for one in weights)
    return torch.cat((q_h.expand(num_queries, -1), k_h.expand(num_heads - num_queries, -1)))


def heads_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    normed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    *,
    whole: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of queries, keys and values side by side, and sums for the weights.

    `gradients` are of the three; `normed` what went into norms of heads, its inverse rms, and both
    weights. The sums are [P, 2, h], or empty.
    """
    dq, dk, dv = gradients
    cos_TE, sin_TE = tables
    wide = cos_TE.dtype
    dqk = _turned(torch.cat((dq, dk), dim=2).to(wide), cos_TE, -sin_TE)
    sums = dqk.new_empty((0,))
    if normed is not None:
        x, inverse, q_weight_h, k_weight_h = normed
        weight = _weight_of_heads((q_weight_h, k_weight_h), dq.shape[2], x.shape[2], wide)
        x_hat = x.to(wide) * inverse
        products = (dqk * x_hat).flatten(0, 1)
        each = (products[:, : dq.shape[2]].sum(1), products[:, dq.shape[2] :].sum(1))
        sums = partial_sums(torch.cat(each, dim=-1), whole=whole).view(-1, 2, x.shape[-1])
        scaled = dqk * weight
        dqk = inverse * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
    return torch.cat((dqk.to(dv.dtype), dv), dim=2), sums


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of gate and up side by side."""
    gate, up = gate_up.to(at_least_fp32(gate_up.dtype)).chunk(2, dim=-1)
    return (fn.silu(gate) * up).to(gate_up.dtype)


def weighted_swiglu(gate_up: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of gate and up side by side, times the weight of the row."""
    gate, up = gate_up.to(at_least_fp32(gate_up.dtype)).chunk(2, dim=-1)
    return (fn.silu(gate) * up * weights_R.to(gate.dtype).unsqueeze(-1)).to(gate_up.dtype)


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient of gate and up, side by side."""
    wide = at_least_fp32(gate_up.dtype)
    return _gate_up_gradient(dy.to(wide), *gate_up.to(wide).chunk(2, dim=-1)).to(gate_up.dtype)


def _gate_up_gradient(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    # d silu / d gate = sigmoid + silu (1 - sigmoid)
    dgate = dy * (sigmoid + silu * (1 - sigmoid)) * up
    return torch.cat((dgate, dy * silu), dim=-1)


def weighted_swiglu_backward(
    dy_RF: torch.Tensor, gate_up: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output again, and the gradients of gate and up, and of the weights."""
    wide = at_least_fp32(gate_up.dtype)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    dy_wide, weights = dy_RF.to(wide), weights_R.to(wide).unsqueeze(-1)
    y = fn.silu(gate) * up
    dweights_R = (dy_wide * y).sum(-1).to(weights_R.dtype)
    dgate_up = _gate_up_gradient(dy_wide * weights, gate, up)
    return (y * weights).to(dy_RF.dtype), dgate_up.to(gate_up.dtype), dweights_R


def loss_statistics(logits_CV: torch.Tensor, local_C: torch.Tensor) -> torch.Tensor:
    """Return maximum, sum of exp(logit - maximum) and logit `local_C` of each row [3, C]."""
    wide = at_least_fp32(logits_CV.dtype)
    values = logits_CV.to(wide)
    # A rank that holds only padding has no maximum; any finite number does, its sum is 0.
    maximum_C = values.amax(1).clamp(min=torch.finfo(wide).min)
    total_C = (values - maximum_C.unsqueeze(1)).exp().sum(1)
    return torch.stack((maximum_C, total_C, values.gather(1, local_C.unsqueeze(1)).squeeze(1)))


def loss_gradient(
    logits_CV: torch.Tensor,
    log_sum_C: torch.Tensor,
    local_C: torch.Tensor,
    mine_C: torch.Tensor,
    factor_C: torch.Tensor,
) -> None:
    """Turn logits into factor x (softmax - one-hot) in place."""
    wide = at_least_fp32(logits_CV.dtype)
    softmax = (logits_CV.to(wide) - log_sum_C.to(wide).unsqueeze(1)).exp()
    columns = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    one_hot = torch.where(mine_C, local_C, -1).unsqueeze(1) == columns
    gradient = factor_C.to(wide).unsqueeze(1) * (softmax - one_hot.to(wide))
    logits_CV.copy_(gradient.to(logits_CV.dtype))
