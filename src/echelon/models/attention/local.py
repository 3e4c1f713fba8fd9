"""Attention of the queries and keys that are here: pieces through kernels, merged exactly.

A ring calls `attend_pieces` once for every block of keys that passes, into the same `Merged`, and
`backward_pieces` again with the merged output; on one device `LocalAttention` is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from echelon.models.attention.interface import Attended, Gradients, Scores, cut
from echelon.models.attention.kernels import kernel_for
from echelon.models.attention.merge import Merged
from echelon.models.attention.pieces import Piece


def attend_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pieces: Sequence[Piece],
    soft_cap: float | None = None,
    into: Merged | None = None,
) -> Merged:
    """Return `into`, or a new merge, with the attention of q [T,B,H,hd] over k, v [S,B,K,hd]."""
    merged = Merged.like(q) if into is None else into
    kernel = kernel_for(q.device, q.dtype, q.shape[-1], soft_cap)
    for piece in pieces:
        scores = _scores(q, piece, soft_cap)
        merged.add(piece, *kernel.forward(*cut(piece, q, k, v), scores))
    return merged


def backward_pieces(
    dout: torch.Tensor,
    attended: Attended,
    pieces: Sequence[Piece],
    soft_cap: float | None = None,
    into: Gradients | None = None,
) -> Gradients:
    """Return `into`, or new gradients, with those of the pieces added.

    The output and log-sum-exp of `attended` are those of all keys that the queries met, in these
    pieces or others. New gradients of several pieces are in at least float32.
    """
    q, k, v = attended.q, attended.k, attended.v
    kernel = kernel_for(q.device, q.dtype, q.shape[-1], soft_cap)
    if into is None and len(pieces) == 1 and pieces[0].covers(q.shape[0], k.shape[0]):
        return kernel.backward(dout, attended, _scores(q, pieces[0], soft_cap))
    total = Gradients.zeros(q, k, v) if into is None else into
    for piece in pieces:
        rows = dout[piece.q, piece.sequences]
        total.add(piece, kernel.backward(rows, attended.cut(piece), _scores(q, piece, soft_cap)))
    return total


class LocalAttention(torch.autograd.Function):
    """Attend in one step of autograd that keeps q, k, v, the output and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pieces: Sequence[Piece],
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Return out [T, B, H, hd] in the dtype of `q`."""
        out, lse = attend_pieces(q, k, v, pieces, soft_cap).result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.soft_cap = pieces, soft_cap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        attended = Attended(*ctx.saved_tensors)
        found = backward_pieces(dout, attended, ctx.pieces, ctx.soft_cap)
        dq, dk, dv = found.to(attended.q.dtype)
        return dq, dk, dv, None, None


def _scores(q: torch.Tensor, piece: Piece, soft_cap: float | None) -> Scores:
    return Scores(band=piece.band, scale=q.shape[-1] ** -0.5, soft_cap=soft_cap)
