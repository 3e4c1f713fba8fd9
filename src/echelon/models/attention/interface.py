# SPDX-License-Identifier: Apache-2.0
"""What every kernel of attention takes and gives, for one piece of queries and keys.

A kernel returns the log-sum-exp of its scores beside its output, so that the results of several
pieces merge exactly; every query of a piece meets a key. Its backward takes the output and the
log-sum-exp *after* merging: then the weights that it computes again are those of the whole softmax,
and gradients of pieces just add up. Out and gradients have the dtype of `q` or a wider one.

Shapes: q, out, dout [T, B, H, hd], k, v [S, B, K, hd], lse [B, H, T], natural log, in at least
float32. K divides H; query head h meets key head h // (H / K). Tensors may be strided views whose
last dim is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from echelon.core.attention_mask import Band
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.precision import at_least_fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """Say which scores count, and how they come from products: ``cap(scale * q k)``."""

    band: Band
    scale: float
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """Hold what a forward pass keeps: its inputs, its output, its log-sum-exp."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def tile(self, piece: AttentionTile) -> SavedAttention:
        """Return views of the rows and columns of a piece."""
        q, k, v = slice_tile(piece, self.q, self.k, self.v)
        rows, sequences = piece.q, piece.sequences
        return SavedAttention(q, k, v, self.out[rows, sequences], self.lse[sequences, :, rows])


class AttentionGradients(NamedTuple):
    """Hold the gradients of queries, keys and values."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    @classmethod
    def zeros(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionGradients:
        """Return accumulators in at least float32."""
        wide = at_least_fp32(q.dtype)
        return cls(*(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)))

    def add(self, tile: AttentionTile, tile_gradients: AttentionGradients) -> None:
        """Add the gradients of a piece, in place."""
        for whole, part in zip(
            slice_tile(tile, self.dq, self.dk, self.dv), tile_gradients, strict=True
        ):
            whole.add_(part)

    def to(self, dtype: torch.dtype) -> AttentionGradients:
        """Return the gradients in a dtype."""
        return AttentionGradients(*(x.to(dtype) for x in self))


def slice_tile(
    piece: AttentionTile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of the rows of `q` and the columns of `k` and `v` that a piece names."""
    sequences = piece.sequences
    return q[piece.q, sequences], k[piece.k, sequences], v[piece.k, sequences]


def band_visible(band: Band, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return whether a query meets a key, [T, S]."""
    queries_T = torch.arange(num_queries, device=device)
    ahead_TS = queries_T[:, None] - torch.arange(num_keys, device=device)[None, :]
    seen = torch.ones_like(ahead_TS, dtype=torch.bool)
    if band.low is not None:
        seen &= ahead_TS >= band.low
    if band.high is not None:
        seen &= ahead_TS <= band.high
    return seen


def band_bias(band: Band, num_queries: int, num_keys: int, like: torch.Tensor) -> torch.Tensor:
    """Return what fused kernels add to scores, [T, S]: 0, or too little for any weight to be left.

    It is finite: fused kernels meet blocks of keys of which a query sees none. float16 has no
    number that is small enough beside every score: `like` may not have that dtype.
    """
    assert like.dtype != torch.float16
    hidden = ~band_visible(band, num_queries, num_keys, like.device)
    bias_TS = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return bias_TS.masked_fill_(hidden, torch.finfo(like.dtype).min / 2)
