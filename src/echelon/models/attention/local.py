# SPDX-License-Identifier: Apache-2.0
"""Attention of the queries and keys that are here: pieces through kernels, merged exactly.

A ring calls `attend_tiles` once for every block of keys that passes, into the same
`OnlineSoftmax`, and `backward_tiles` again with the merged output; on one device `LocalAttention`
is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from echelon.core.choices.kernels import ATTENTION_KERNELS, AttentionKernel, cudnn_takes_squares
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.attention.flash import flash_on
from echelon.models.attention.fused import HEAD_DIM_MULTIPLE, FusedCpuKernel, FusedGpuKernel
from echelon.models.attention.interface import (
    AttentionGradients,
    HeadSinks,
    OnlineSoftmax,
    SavedAttention,
    ScoreRule,
    slice_tile,
)
from echelon.models.attention.packed import attend_packed, backward_packed, placed_calls
from echelon.models.attention.plain import PlainKernel
from echelon.models.precision import LOW_PRECISION


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Say what a model and a plan ask of attention: scale and cap of scores, sinks, and a kernel.

    A `scale` of None divides products by the root of the head's width. Who has merged all keys of
    a query adds the sinks, and gives on their gradients.

    A rehearsal takes the kernels of a GPU with `planned_capability`, that of the plan's cluster; a
    run asks the GPU that it is on.
    """

    scale: float | None = None
    soft_cap: float | None = None
    kernel: AttentionKernel = "auto"
    planned_capability: float = 0.0
    sinks: HeadSinks | None = None
    pieces: PieceSizes = TRAINING_PIECES


NO_CAP = AttentionRule()


def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, rule: AttentionRule = NO_CAP
) -> FusedCpuKernel | FusedGpuKernel | PlainKernel:
    """Return the kernel that a rule asks for; of "auto", the fastest that is right.

    No fused one has a soft cap.
    """
    if rule.soft_cap is not None or rule.kernel == "plain":
        return PlainKernel(rule.pieces)
    if device.type == "cpu":
        return FusedCpuKernel()
    fused = dtype != torch.float64 and head_dim % HEAD_DIM_MULTIPLE == 0
    on_meta = device.type == "meta"  # what a rehearsal asks for
    if not fused or not (on_meta or (device.type == "cuda" and torch.version.hip is None)):
        return PlainKernel(rule.pieces)
    has_flash = on_meta or torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype in LOW_PRECISION and has_flash and head_dim <= ATTENTION_KERNELS["flash"].max_head_dim:
        flash = flash_on(device, rule.kernel)
        capability = rule.planned_capability if on_meta else _capability(device)
        squares = not flash.is_third and cudnn_takes_squares(rule.kernel, capability, head_dim)
        return FusedGpuKernel(flash, cudnn=squares)
    return FusedGpuKernel(None)


def _capability(device: torch.device) -> float:
    major, minor = torch.cuda.get_device_capability(device)
    return float(f"{major}.{minor}")


def takes_any_band(q: torch.Tensor, rule: AttentionRule) -> bool:
    """Return whether a window over queries like q is one call, so that it needs no tiles."""
    return kernel_for(q.device, q.dtype, q.shape[-1], rule).flash is not None


def attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[AttentionTile],
    rule: AttentionRule = NO_CAP,
    into: OnlineSoftmax | None = None,
) -> OnlineSoftmax:
    """Return `into`, or a new merge, with the attention of q [T,B,H,hd] over k, v [S,B,K,hd]."""
    merged = OnlineSoftmax(q.shape, q.dtype, q.device) if into is None else into
    kernel = kernel_for(q.device, q.dtype, q.shape[-1], rule)
    for call in placed_calls(tiles, q, k) if kernel.flash is not None else ():
        assert kernel.flash is not None
        attend_packed(q, k, v, call.scaled(rule.scale), kernel.flash, merged)
        tiles = ()
    for piece in tiles:
        scores = _scores(q, piece, rule)
        merged.add(piece, *kernel.forward(*slice_tile(piece, q, k, v), scores))
    return merged


def backward_tiles(
    dout: torch.Tensor,
    attended: SavedAttention,
    tiles: Sequence[AttentionTile],
    rule: AttentionRule = NO_CAP,
    into: AttentionGradients | None = None,
) -> AttentionGradients:
    """Return `into`, or new gradients, with those of the pieces added.

    The output and log-sum-exp of `attended` are those of all keys that the queries met, in these
    pieces or others. New gradients of several pieces are in at least float32.
    """
    q, k, v = attended.q, attended.k, attended.v
    kernel = kernel_for(q.device, q.dtype, q.shape[-1], rule)
    if into is None and len(tiles) == 1 and tiles[0].covers(q.shape[0], k.shape[0]):
        return kernel.backward(dout, attended, _scores(q, tiles[0], rule))
    total = into
    for call in placed_calls(tiles, q, k) if kernel.flash is not None else ():
        assert kernel.flash is not None
        scaled = call.scaled(rule.scale)
        total = backward_packed(dout, attended, scaled, kernel.flash, total)
        tiles = ()
    total = AttentionGradients.zeros(q, k, v) if total is None else total
    for piece in tiles:
        rows = dout[piece.q, piece.sequences]
        total.add(piece, kernel.backward(rows, attended.tile(piece), _scores(q, piece, rule)))
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
        rule: AttentionRule = NO_CAP,
    ) -> torch.Tensor:
        """Return out [T, B, H, hd] in the dtype of `q`."""
        merged = attend_tiles(q, k, v, pieces, rule)
        if rule.sinks is not None:
            merged.add_sinks(rule.sinks.values_H)
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles, ctx.rule = pieces, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        attended = SavedAttention(*ctx.saved_tensors)
        if ctx.rule.sinks is not None:
            ctx.rule.sinks.backward(dout, attended.out, attended.lse)
        found = backward_tiles(dout, attended, ctx.tiles, ctx.rule)
        dq, dk, dv = found.to(attended.q.dtype)
        return dq, dk, dv, None, None


def _scores(q: torch.Tensor, piece: AttentionTile, rule: AttentionRule) -> ScoreRule:
    scale = q.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    return ScoreRule(band=piece.band, scale=scale, soft_cap=rule.soft_cap)
