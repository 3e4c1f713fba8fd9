# SPDX-License-Identifier: Apache-2.0
"""The sum of token losses from logits that a module made, without a second table of their size.

`torch.nn.functional.cross_entropy` keeps the logarithm of every probability, and its backward makes
two more tables as large as the logits: one of zeros but for the labels, and the gradient. Here one
number of each row is kept, and the gradient is all that is made. Both passes go over pieces of the
rows that stay in cache, and compute each in at least float32.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.module.forwards.own_forward import is_transformed


class TokenLossSum(torch.autograd.Function):
    """Add up -log softmax(logits)[label] over the rows whose label is not `ignored`."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, ignored: int
    ) -> torch.Tensor:
        """Return the sum, in at least float32; keep the logits, and two numbers of each row."""
        counted_N = labels_N != ignored
        local_N1 = torch.where(counted_N, labels_N, 0).unsqueeze(1)
        wide = at_least_fp32(logits_NV.dtype)
        maxima_N1 = logits_NV.amax(1, keepdim=True).to(wide)
        totals_N1 = torch.empty_like(maxima_N1)
        for rows in row_chunks(logits_NV):
            piece = torch.sub(logits_NV[rows], maxima_N1[rows]).exp_()
            torch.sum(piece, dim=1, keepdim=True, out=totals_N1[rows])
        losses_N1 = totals_N1.log() + maxima_N1 - logits_NV.gather(1, local_N1)
        ctx.save_for_backward(logits_NV, local_N1, counted_N, maxima_N1, totals_N1)
        return losses_N1.squeeze(1).masked_fill(~counted_N, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return factor x (softmax - one-hot) of the rows that count, and zero of the others."""
        logits_NV, local_N1, counted_N, maxima_N1, totals_N1 = ctx.saved_tensors
        factors_N1 = torch.where(counted_N, factor, 0.0).to(maxima_N1.dtype).unsqueeze(1)
        shares_N1 = factors_N1 / totals_N1
        gradient_NV = torch.empty_like(logits_NV)
        widens = maxima_N1.dtype != logits_NV.dtype
        for rows in row_chunks(logits_NV):
            into = None if widens else gradient_NV[rows]
            piece = torch.sub(logits_NV[rows], maxima_N1[rows], out=into)
            piece.exp_().mul_(shares_N1[rows]).scatter_add_(1, local_N1[rows], -factors_N1[rows])
            if widens:
                gradient_NV[rows] = piece
        return gradient_NV, None, None


def token_loss_sum(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, *, ignored: int
) -> torch.Tensor:
    """Return the sum of the losses of tokens whose label is not `ignored`."""
    if is_transformed():
        wide_NV = logits_NV.to(at_least_fp32(logits_NV.dtype))
        return functional.cross_entropy(wide_NV, labels_N, ignore_index=ignored, reduction="sum")
    total: Any = TokenLossSum.apply(logits_NV, labels_N, ignored)
    return total
