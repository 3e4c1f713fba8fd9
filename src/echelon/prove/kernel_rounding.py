"""Attention on one device, rounded where every fast kernel rounds.

Autograd through the plain operations keeps the gradient of the scores in float32 at the least, and
subtracts from it the sum over its own products. A kernel that keeps no scores takes that sum from
the rounded output, and rounds the gradient of the scores before it is multiplied with keys and
queries (Dao et al., "FlashAttention", 2022, algorithm 4). One device rounds alike: its error is
the measure of the plan's.

Shape suffixes: see `models/operations.py`; S positions of keys.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.core.model_shape import ModelShape
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations
from echelon.models.precision import widened


class _Attention(torch.autograd.Function):
    """softmax(q k^T / sqrt(head_dim)) v where visible; operands are rounded, sums are wide."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: torch.Tensor,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Return the output, [B, H, T, head_dim], for as many key as query heads."""
        scores = widened(q) @ widened(k).mT / q.shape[-1] ** 0.5
        slope_BHTS = torch.ones((), dtype=scores.dtype)
        if soft_cap is not None:
            tanh = torch.tanh(scores / soft_cap)
            scores, slope_BHTS = soft_cap * tanh, 1 - tanh.square()
        weights_BHTS = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out = (_rounded(weights_BHTS, q) @ widened(v)).to(q.dtype)
        ctx.save_for_backward(q, k, v, weights_BHTS, slope_BHTS, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        q, k, v, weights_BHTS, slope_BHTS, out = ctx.saved_tensors
        dout = widened(dout)
        dv = _rounded(weights_BHTS, q).mT @ dout
        pull = (dout * out).sum(-1, keepdim=True)
        dscores = weights_BHTS * (dout @ widened(v).mT - pull) * slope_BHTS
        dscores = _rounded(dscores, q) / q.shape[-1] ** 0.5
        dq, dk = dscores @ widened(k), dscores.mT @ widened(q)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None


def _rounded(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return widened(x.to(like.dtype))


class KernelOperations(Operations):
    """The plain operations, but for attention."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return attention of q [T,B,H,hd] over k, v [T,B,K,hd], as [N, H * hd]."""
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        positions_T = batch.positions_T
        seen = visible(positions_T, positions_T, shape.mask, batch.documents)
        seen = seen if seen.dim() == 2 else seen[:, None]
        operands = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = _Attention.apply(*operands, seen, shape.soft_cap)
        return out.permute(2, 0, 1, 3).reshape(q.shape[0] * q.shape[1], -1)
