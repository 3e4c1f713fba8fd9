# SPDX-License-Identifier: Apache-2.0
"""Attention by its formulas, block by block: for a soft cap, and where no fused kernel is.

Memory is bounded by a block of rows and columns, never by all of them; what no query of a block
meets is skipped. Everything is computed in at least float32. With s = cap(scale q k), weights
p = exp(s - lse), and delta = sum(dout * out): dv = p^T dout, ds = p (dout v^T - delta) cap',
dq = scale ds k, dk = scale ds^T q (Dao, "FlashAttention-2", 2023, section 2).

Shape suffixes: B sequences, K key/value heads, R the block's rows of all query heads of one key
head, C its columns, hd head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.layout.attention_tiles import AttentionTile
from echelon.models.attention.flash import FlashAttention
from echelon.models.attention.interface import (
    AttentionGradients,
    OnlineSoftmax,
    SavedAttention,
    ScoreRule,
    band_visible,
)
from echelon.models.precision import widened


class PlainKernel:
    """Compute any piece on any device in any dtype."""

    flash: FlashAttention | None = None
    """What takes any band, and many documents, in one call."""

    def __init__(self, sizes: PieceSizes = TRAINING_PIECES) -> None:
        """Hold blocks of scores of `sizes`."""
        self._sizes = sizes

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), both in at least float32."""
        merged = OnlineSoftmax(q.shape, widened(q.new_empty(0)).dtype, q.device)
        for block in _blocks(q, k, scores, self._sizes):
            v_BKCd = _keys(v[block.k])
            scores_BKRC, _ = _scores(q, k, block, scores)
            lse_BKR = scores_BKRC.logsumexp(dim=-1)
            out_BKRd = scores_BKRC.sub_(lse_BKR.unsqueeze(-1)).exp_() @ v_BKCd
            lse_BHT = lse_BKR.reshape(*q.shape[1:3], block.num_queries)
            merged.add(block, _of_heads(out_BKRd, q, block), lse_BHT)
        return merged.result()

    def backward(
        self, dout: torch.Tensor, attended: SavedAttention, scores: ScoreRule
    ) -> AttentionGradients:
        """Return the gradients in at least float32."""
        q, k, v = attended.q, attended.k, attended.v
        total = AttentionGradients.zeros(q, k, v)
        delta_TBH = (widened(dout) * attended.out).sum(-1)
        for block in _blocks(q, k, scores, self._sizes):
            k_BKCd, v_BKCd = _keys(k[block.k]), _keys(v[block.k])
            q_BKRd, dout_BKRd = (_queries(x[block.q], k) for x in (q, dout))
            weights_BKRC, slope = _scores(q, k, block, scores)
            lse_BKR1 = attended.lse[:, :, block.q].reshape(*q_BKRd.shape[:3], 1)
            weights_BKRC.sub_(lse_BKR1).exp_()
            delta_BKR1 = delta_TBH[block.q].permute(1, 2, 0).reshape(lse_BKR1.shape)
            ds_BKRC = (dout_BKRd @ v_BKCd.mT).sub_(delta_BKR1).mul_(weights_BKRC)
            if slope is not None:
                ds_BKRC.mul_(slope)
            ds_BKRC.mul_(scores.scale)
            dq = _of_heads(ds_BKRC @ k_BKCd, q, block)
            dk, dv = ds_BKRC.mT @ q_BKRd, weights_BKRC.mT @ dout_BKRd
            total.add(block, AttentionGradients(dq, dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)))
        return total


def _blocks(
    q: torch.Tensor, k: torch.Tensor, scores: ScoreRule, sizes: PieceSizes
) -> Iterator[AttentionTile]:
    """Yield the visible blocks of rows and columns; each row of one meets a column in it."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    columns = min(num_keys, sizes.score_columns)
    per_query = max(1, columns * q.shape[1] * q.shape[2])
    rows = max(sizes.score_rows, sizes.score_elements // per_query)
    whole = AttentionTile(slice(0, num_queries), slice(0, num_keys), scores.band)
    for first in range(0, num_queries, rows):
        strip = whole.rows(first, min(first + rows, num_queries))
        for left in range(0, num_keys, columns):
            block = strip.columns(left, min(left + columns, num_keys)).trimmed()
            if block is not None:
                yield block


def _scores(
    q: torch.Tensor, k: torch.Tensor, block: AttentionTile, scores: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scores_BKRC, -inf where hidden, and the derivative of their cap, where there is one.

    Both are the block's own memory.
    """
    found_BKRC = (_queries(q[block.q], k) * scores.scale) @ _keys(k[block.k]).mT
    slope = None
    if scores.soft_cap is not None:
        found_BKRC.div_(scores.soft_cap).tanh_()
        slope = 1.0 - found_BKRC.square()
        found_BKRC.mul_(scores.soft_cap)
    if block.form != "full":
        seen = band_visible(block.band, block.num_queries, block.num_keys, q.device)
        by_head = found_BKRC.unflatten(2, (-1, block.num_queries))
        by_head.masked_fill_(~seen, float("-inf"))
    return found_BKRC, slope


def _queries(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return [T, B, H, hd] in rows for each key head, [B, K, H / K * T, hd], widened."""
    length, num_sequences, heads, head_dim = x.shape
    rows = heads // k.shape[2] * length
    return widened(x.permute(1, 2, 0, 3).reshape(num_sequences, k.shape[2], rows, head_dim))


def _keys(x: torch.Tensor) -> torch.Tensor:
    """Return [S, B, K, hd] as [B, K, S, hd], widened."""
    return widened(x.permute(1, 2, 0, 3))


def _of_heads(x_BKRd: torch.Tensor, q: torch.Tensor, block: AttentionTile) -> torch.Tensor:
    """Return rows for each key head as [T, B, H, hd] again."""
    _, num_sequences, heads, head_dim = q.shape
    by_head = x_BKRd.reshape(num_sequences, heads, block.num_queries, head_dim)
    return by_head.permute(2, 0, 1, 3)
