# SPDX-License-Identifier: Apache-2.0
"""Attention to be read: every score at once, a mask made from positions, gradients by autograd.

Shape suffixes: T queries, S keys, B sequences, H query heads, K key/value heads, hd head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.attention_mask import AttentionMask, DocumentStarts
from echelon.models.precision import widened


def visible(
    query_positions_T: torch.Tensor,
    key_positions_S: torch.Tensor,
    mask: AttentionMask,
    documents: DocumentStarts | None,
) -> torch.Tensor:
    """Return whether a query meets a key: [T, S], or [B, T, S] where there are documents."""
    ahead_TS = query_positions_T[:, None] - key_positions_S[None, :]
    seen = torch.ones_like(ahead_TS, dtype=torch.bool)
    if mask.causal:
        seen = seen & (ahead_TS >= 0)
    if mask.window is not None:
        seen = seen & (ahead_TS.abs() < mask.window)
    if documents is None:
        return seen
    same = [
        _document(query_positions_T, starts)[:, None] == _document(key_positions_S, starts)[None, :]
        for starts in documents
    ]
    return seen & torch.stack(same)


def _document(positions: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
    """Return how many documents have started at each position."""
    return (positions[:, None] >= torch.tensor(starts, device=positions.device)).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreForm:
    """Say how scores come of products; `scale` None: divided by the root of the head's width."""

    scale: float | None = None
    soft_cap: float | None = None


PLAIN_SCORES = ScoreForm()


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scores: ScoreForm = PLAIN_SCORES,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [T, B, H, hd] and the log-sum-exp of the scores, and of sinks, [B, H, T].

    `q` is [T, B, H, hd], `k` and `v` are [S, B, K, hd], `visible` is what `visible` returns. Scores
    are computed in at least float32. A query that meets nothing gets out 0, lse -inf, gradient 0.
    A sink is the score of a key whose value is 0, for all queries of a head.
    """
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    scores_BHTS = torch.einsum("tbhd,sbhd->bhts", widened(q), widened(k)) * scale
    if scores.soft_cap is not None:
        scores_BHTS = scores.soft_cap * torch.tanh(scores_BHTS / scores.soft_cap)
    seen = visible if visible.dim() == 2 else visible[:, None]
    lonely = ~seen.any(-1, keepdim=True)
    # The softmax of a row of -inf is not a number: a lonely row is computed, then dropped.
    scores_BHTS = scores_BHTS.masked_fill(~seen & ~lonely, float("-inf"))
    if sinks_H is not None:
        sinks_BHT1 = widened(sinks_H)[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
        scores_BHTS = torch.cat((scores_BHTS, sinks_BHT1.to(scores_BHTS.dtype)), dim=-1)
    weights_BHTS = scores_BHTS.softmax(dim=-1)[..., : len(k)].masked_fill(lonely, 0.0).to(v.dtype)
    lse_BHT = scores_BHTS.logsumexp(dim=-1).masked_fill(lonely.squeeze(-1), float("-inf"))
    return torch.einsum("bhts,sbhd->tbhd", weights_BHTS, v), lse_BHT
