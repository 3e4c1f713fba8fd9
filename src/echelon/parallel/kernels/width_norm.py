# SPDX-License-Identifier: Apache-2.0
"""The norm of queries, or of keys, over all heads together, of which a tensor rank has a part.

Split: the width of all heads, and the weight of the norm, as the layers that give the heads are.
Sent:  the sums of squares of each token's queries and keys, in one all-reduce forward; backward one
       for each of the two norms, of what pulls a token's gradient towards its direction.
Bytes: `width_norm_bytes` in `cost/bytes/sent.py`.
Must divide: nothing more than heads do.
Source: OLMo 2, 2024, section 2.2; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

Sums are at least float32. The gradient of the weight is made while the sum is under way.
Shape suffixes: D width of the heads of this rank, R rows of a piece; W is the width of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.models.precision import LOW_PRECISION, at_least_fp32
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.transport.collectives import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthShare:
    """Say which ranks have a part of the width, and where gradients go."""

    group: Group
    store: GradientStore
    pieces: PieceSizes = TRAINING_PIECES


def inverse_rms(
    parts: Sequence[torch.Tensor], eps: float, group: Group, pieces: PieceSizes = TRAINING_PIECES
) -> tuple[torch.Tensor, ...]:
    """Return 1 / rms of each row of tensors [..., D], over the parts of all ranks: [..., 1] each.

    Their rows are equally many. The sums of all tensors are one message.
    """
    first = parts[0]
    size = (len(parts), *first.shape[:-1], 1)
    with torch.no_grad():
        sums = torch.empty(size, dtype=at_least_fp32(first.dtype), device=first.device)
        for total, x in zip(sums, parts, strict=True):
            _write_squares(x, total, pieces)
        group.all_reduce(sums, name="width_norm.forward").wait()
        return tuple(
            torch.rsqrt((total / (x.shape[-1] * group.size)).add_(eps))
            for total, x in zip(sums, parts, strict=True)
        )


def _write_squares(x: torch.Tensor, out: torch.Tensor, pieces: PieceSizes) -> None:
    """Write the sum of squares of each row of x into `out`."""
    if x.dtype not in LOW_PRECISION:
        out.copy_(torch.linalg.vecdot(x, x).unsqueeze(-1))
        return
    for rows in row_chunks(x, pieces):
        norm = torch.linalg.vector_norm(x[rows], dim=-1, keepdim=True, dtype=torch.float32)
        torch.square(norm, out=out[rows])


class WidthNorm(torch.autograd.Function):
    """Root-mean-square norm over the width of all tensor ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, inverse: torch.Tensor, share: WidthShare
    ) -> torch.Tensor:
        """Return x / rms(x) * weight for this rank's x [..., D]; keep x and the inverse rms."""
        ctx.weight, ctx.share = weight, share
        ctx.save_for_backward(x, inverse)
        if x.dtype not in LOW_PRECISION:
            return (x * inverse).mul_(weight)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        wide = weight.float()
        for rows in row_chunks(x, share.pieces):
            torch.mul(x[rows] * inverse[rows], wide, out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx = inverse * (dy w - x_hat mean(dy w x_hat)), the mean over all of W."""
        x, inverse = ctx.saved_tensors
        weight: nn.Parameter = ctx.weight
        share: WidthShare = ctx.share
        if x.dtype in LOW_PRECISION:
            return _narrow_backward(dy, x, inverse, weight, share), None, None, None
        x_hat = x * inverse
        scaled = dy * weight
        pull = torch.linalg.vecdot(scaled, x_hat).unsqueeze(-1).contiguous()
        pending = share.group.all_reduce(pull, name="width_norm.backward", async_op=True)
        share.store.add(weight, (dy * x_hat).reshape(-1, x.shape[-1]).sum(0))
        pending.wait()
        pull.div_(x.shape[-1] * share.group.size)
        return scaled.addcmul_(x_hat, pull, value=-1).mul_(inverse), None, None, None


def _narrow_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    weight: nn.Parameter,
    share: WidthShare,
) -> torch.Tensor:
    """Return dx, in float32 a few rows at a time and rounded once; add the weight's gradient."""
    width = x.shape[-1]
    dweight_D = torch.zeros(width, dtype=torch.float32, device=x.device)
    pull = torch.empty_like(inverse)
    weight_D = weight.float()
    for rows in row_chunks(x, share.pieces):
        product_RD = (dy[rows] * inverse[rows]).mul_(x[rows]).reshape(-1, width)
        dweight_D += product_RD.sum(0)
        pull[rows] = torch.mv(product_RD, weight_D).view(inverse[rows].shape)
        del product_RD
    pending = share.group.all_reduce(pull, name="width_norm.backward", async_op=True)
    share.store.add(weight, dweight_D)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pending.wait()
    for rows in row_chunks(x, share.pieces):
        scaled = dy[rows] * inverse[rows]
        away = x[rows] * inverse[rows].square().mul_(pull[rows]).div_(-width * share.group.size)
        torch.addcmul(away, scaled, weight_D, out=dx[rows])
    return dx
