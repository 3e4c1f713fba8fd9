# SPDX-License-Identifier: Apache-2.0
"""What every kernel of attention takes and gives, for one piece of queries and keys.

A kernel returns the log-sum-exp of its scores beside its output, so that the results of several
pieces merge exactly; every query of a piece meets a key. Its backward takes the output and the
log-sum-exp *after* merging: then the weights that it computes again are those of the whole softmax,
and gradients of pieces just add up. Out and gradients have the dtype of `q` or a wider one.

Shapes: q, out, dout [T, B, H, hd], k, v [S, B, K, hd], lse [B, H, T], natural log, in at least
float32. K divides H; query head h meets key head h // (H / K). Tensors may be strided views whose
last dim is contiguous.

Pieces merge in at least float32. With the log-sum-exp l of the keys so far and l' of a further
piece, the merged output is ``out + (out' - out) * exp(l' - log(exp l + exp l'))`` (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; Liu et al., "Ring Attention", 2023).

A sink is a learned score of each query head that takes its share of the softmax: the score of a key
whose value is 0. So of an output o and a log-sum-exp l of all keys it makes
l' = log(exp l + exp sink) and o' = o exp(l - l'), whatever kernel or ring gave o and l; and as
kernels compute weights again from l', their gradients of queries, keys and values are right as they
are. That of the sink is the sum over queries of -exp(sink - l') (dout . o'), for ds is
p (dp - delta) with dp = 0 (gpt-oss, 2025; Dao, "FlashAttention-2", 2023, section 2).

Shape suffixes: T queries, B sequences, H query heads that are attended to here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from echelon.core.attention_mask import Band
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.precision import at_least_fp32, widened


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


class OnlineSoftmax:
    """Hold out [T, B, H, hd] and lse [B, H, T] of the pieces that were added so far."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        """Begin with queries of a shape, a dtype and a device that have met nothing yet."""
        self._shape, self._dtype, self._device = shape, dtype, device
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, tile: AttentionTile, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the result of a piece.

        The first one is taken as it is where it has all rows: its tensors belong to the merge then.
        """
        every_row = tile.sequence is None and tile.q == slice(0, self._shape[0])
        if self._state is None and every_row:
            self._state = out, lse
            return
        out_TBHd, lse_BHT = self._state = self._widened()
        rows, sequences = tile.q, tile.sequences
        so_far = lse_BHT[sequences, :, rows]
        total = torch.logaddexp(so_far, lse)
        # A row that has met nothing has -inf in all three.
        weight = torch.exp(lse - total.clamp(min=torch.finfo(total.dtype).min))
        out_TBHd[rows, sequences].lerp_(widened(out), weight.permute(2, 0, 1).unsqueeze(-1))
        so_far.copy_(total)

    def add_sinks(self, sinks_H: torch.Tensor) -> None:
        """Give each head's sink its share of the softmax; what has met nothing still gives 0."""
        out_TBHd, lse_BHT = self._state = self._widened()
        total_BHT = torch.logaddexp(lse_BHT, sinks_H.to(lse_BHT.dtype)[:, None])
        out_TBHd.mul_((lse_BHT - total_BHT).exp_().permute(2, 0, 1).unsqueeze(-1))
        lse_BHT.copy_(total_BHT)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse): out in the dtype of the queries; 0 and -inf for what met nothing."""
        out_TBHd, lse_BHT = self._widened() if self._state is None else self._state
        return out_TBHd.to(self._dtype), lse_BHT

    def _widened(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state in a dtype and a memory that may be added to."""
        if self._state is not None:
            out_TBHd, lse_BHT = self._state
            return widened(out_TBHd), lse_BHT
        length, num_sequences, heads, _ = self._shape
        wide, device = at_least_fp32(self._dtype), self._device
        lse_shape = (num_sequences, heads, length)
        return (
            torch.zeros(self._shape, dtype=wide, device=device),
            torch.full(lse_shape, float("-inf"), dtype=wide, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSinks:
    """Hold the sinks of the heads of a tensor rank, of which `heads` are attended to here.

    `add` takes the gradient of all of them, once for each forward pass: 0 for heads elsewhere.
    """

    weight: nn.Parameter
    add: Callable[[nn.Parameter, torch.Tensor], None]
    heads: slice

    @property
    def values_H(self) -> torch.Tensor:
        """Return the sinks of the heads here."""
        return self.weight.detach()[self.heads]

    def backward(
        self, dout_TBHd: torch.Tensor, out_TBHd: torch.Tensor, lse_BHT: torch.Tensor
    ) -> None:
        """Give on the gradient, from the output and the log-sum-exp with the sinks in them."""
        pull_TBH = (widened(dout_TBHd) * widened(out_TBHd)).sum(-1)
        shares_BHT = (widened(self.values_H)[:, None] - lse_BHT).exp()
        gradient_H = torch.einsum("bht,tbh->h", shares_BHT, pull_TBH.to(shares_BHT.dtype)).neg()
        whole_H = gradient_H.new_zeros(self.weight.shape)
        whole_H[self.heads] = gradient_H
        self.add(self.weight, whole_H)
