"""Attention of the queries and keys that are here: pieces through kernels, merged exactly.

A ring calls `attend_tiles` once for every block of keys that passes, into the same
`OnlineSoftmax`, and `backward_tiles` again with the merged output; on one device `LocalAttention`
is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from echelon.models.attention.boxes import AttentionTile
from echelon.models.attention.fused import HEAD_DIM_MULTIPLE, FusedCpuKernel, FusedGpuKernel
from echelon.models.attention.interface import (
    AttentionGradients,
    SavedAttention,
    ScoreRule,
    slice_tile,
)
from echelon.models.attention.online_softmax import OnlineSoftmax
from echelon.models.attention.plain import PlainKernel


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, soft_cap: float | None
) -> FusedCpuKernel | FusedGpuKernel | PlainKernel:
    """Return the fastest kernel that is right; no fused one has a soft cap."""
    if soft_cap is not None:
        return PlainKernel()
    if device.type == "cpu":
        return FusedCpuKernel()
    fused = dtype != torch.float64 and head_dim % HEAD_DIM_MULTIPLE == 0
    if device.type == "meta" and fused:
        return FusedGpuKernel(flash=True)  # what a rehearsal asks for
    if device.type == "cuda" and torch.version.hip is None and fused:
        return FusedGpuKernel(flash=torch.cuda.get_device_capability(device) >= (8, 0))
    return PlainKernel()


def attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[AttentionTile],
    soft_cap: float | None = None,
    into: OnlineSoftmax | None = None,
) -> OnlineSoftmax:
    """Return `into`, or a new merge, with the attention of q [T,B,H,hd] over k, v [S,B,K,hd]."""
    merged = OnlineSoftmax(q.shape, q.dtype, q.device) if into is None else into
    kernel = kernel_for(q.device, q.dtype, q.shape[-1], soft_cap)
    for piece in tiles:
        scores = _scores(q, piece, soft_cap)
        merged.add(piece, *kernel.forward(*slice_tile(piece, q, k, v), scores))
    return merged


def backward_tiles(
    dout: torch.Tensor,
    attended: SavedAttention,
    tiles: Sequence[AttentionTile],
    soft_cap: float | None = None,
    into: AttentionGradients | None = None,
) -> AttentionGradients:
    """Return `into`, or new gradients, with those of the pieces added.

    The output and log-sum-exp of `attended` are those of all keys that the queries met, in these
    pieces or others. New gradients of several pieces are in at least float32.
    """
    q, k, v = attended.q, attended.k, attended.v
    kernel = kernel_for(q.device, q.dtype, q.shape[-1], soft_cap)
    if into is None and len(tiles) == 1 and tiles[0].covers(q.shape[0], k.shape[0]):
        return kernel.backward(dout, attended, _scores(q, tiles[0], soft_cap))
    total = AttentionGradients.zeros(q, k, v) if into is None else into
    for piece in tiles:
        rows = dout[piece.q, piece.sequences]
        total.add(piece, kernel.backward(rows, attended.tile(piece), _scores(q, piece, soft_cap)))
    return total


class LocalAttention(torch.autograd.Function):
    """Attend in one step of autograd that keeps q, k, v, the output and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pieces: Sequence[AttentionTile],
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Return out [T, B, H, hd] in the dtype of `q`."""
        out, lse = attend_tiles(q, k, v, pieces, soft_cap).result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles, ctx.soft_cap = pieces, soft_cap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        attended = SavedAttention(*ctx.saved_tensors)
        found = backward_tiles(dout, attended, ctx.tiles, ctx.soft_cap)
        dq, dk, dv = found.to(attended.q.dtype)
        return dq, dk, dv, None, None


def _scores(q: torch.Tensor, piece: AttentionTile, soft_cap: float | None) -> ScoreRule:
    return ScoreRule(band=piece.band, scale=q.shape[-1] ** -0.5, soft_cap=soft_cap)
