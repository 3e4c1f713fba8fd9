# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts, and of single tokens, over keys and values: forward only.

Fused attention of PyTorch where nothing stands against it; scores one by one where they are capped,
or where values are not as wide as keys (latent attention). Weights are computed in at least
float32. Of a prompt a few queries are taken at a time, so that scores stay small.

Shape suffixes: T queries of a prompt, B sequences, S keys, H query heads, K key/value heads, R
query heads of a key, E width of a key, U width of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from echelon.core.attention_mask import AttentionMask
from echelon.models.attention.reference import visible
from echelon.models.precision import widened

_QUERIES = 256  # queries of a prompt whose scores are held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttention:
    """Say how scores become weights."""

    scale: float
    mask: AttentionMask
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None

    def of_prompt(
        self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKU: torch.Tensor
    ) -> torch.Tensor:
        """Return what the queries of a prompt find in its own keys, [T, H, U]."""
        num_heads, length = k_TKE.shape[1], len(q_THE)
        q_KRTE = q_THE.unflatten(1, (num_heads, -1)).permute(1, 2, 0, 3)
        k_KTE, v_KTU = k_TKE.transpose(0, 1), v_TKU.transpose(0, 1)
        at = torch.arange(length, device=q_THE.device)
        found: list[torch.Tensor] = []
        for start in range(0, length, _QUERIES):
            rows = slice(start, min(start + _QUERIES, length))
            first = 0 if self.mask.window is None else max(0, start - self.mask.window + 1)
            keys = slice(first, rows.stop)
            seen_TS = visible(at[rows], at[keys], self.mask, None)
            part = self._weigh(
                q_KRTE[:, :, rows],
                k_KTE[:, None, keys],
                v_KTU[:, None, keys],
                seen_TS,
                None if self.sinks_H is None else self.sinks_H.view(num_heads, -1, 1, 1),
            )
            found.append(part.permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(found)

    def of_next(
        self,
        q_BHE: torch.Tensor,
        k_BSKE: torch.Tensor,
        v_BSKU: torch.Tensor,
        seen_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what the next token of each sequence finds in what is cached of it, [B, H, U]."""
        # The query heads of a key stand where a prompt has its queries: nothing is repeated.
        q_BKRE = q_BHE.unflatten(1, (k_BSKE.shape[2], -1))
        k_BKSE, v_BKSU = k_BSKE.transpose(1, 2), v_BSKU.transpose(1, 2)
        seen = None if seen_BS is None else seen_BS[:, None, None]
        sinks = None if self.sinks_H is None else self.sinks_H.view(1, k_BSKE.shape[2], -1, 1)
        return self._weigh(q_BKRE, k_BKSE, v_BKSU, seen, sinks).flatten(1, 2)

    def _weigh(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.soft_cap is None and sinks is None and q.shape[-1] == v.shape[-1]:
            k, v = (x.expand(*q.shape[:2], *x.shape[2:]) for x in (k, v))
            return fn.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        scores = widened(q @ k.transpose(-1, -2)) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v
