# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: queries, and keys with values, come out of two narrow vectors.

A token keeps `kv_rank` numbers that all its keys and values are made of, and one key part of
`rope_dim` that carries its position and that all heads share; queries pass through `query_rank`
numbers of their own, or come straight out of the stream (DeepSeek-V2-Lite). So a head's key is
[own | shared], with rotary positions in the second part only, and its value, of `value_dim`, may be
narrower than a key. Attention here is one for keys and values of equal width: values get zeros
behind them, and the output loses them again.
Source: DeepSeek-V2, 2024, section 2.1; DeepSeek-V3, 2024, section 2.1.1.

Shape suffixes: see `models/operations.py`; also R rank, P rope_dim.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.model_shape import LatentAttention as LatentShape
from echelon.core.model_shape import ModelShape
from echelon.models.batch import TokenBatch
from echelon.models.modules import Weight, block_linear
from echelon.models.operations import Operations


class MultiHeadLatentAttention(nn.Module):
    """Attention whose projections go down to a narrow vector and up to all heads."""

    def __init__(
        self, shape: ModelShape, latent: LatentShape, operations: Operations, tp: int
    ) -> None:
        """Make the projections: up and out for the heads of one of `tp` tensor ranks.

        What leads down is not split: the narrow vectors are needed whole on every rank.
        """
        super().__init__()
        assert shape.head_dim == latent.nope_dim + latent.rope_dim >= latent.value_dim
        assert shape.kv_heads == shape.heads
        assert shape.positions == "rope"
        self.shape, self.latent, self.operations = shape, latent, operations
        self.heads = shape.heads // tp
        width = shape.hidden if latent.query_rank is None else latent.query_rank
        if latent.query_rank is not None:
            self.q_norm = Weight(width)
            self.q_down = block_linear(shape, "q_down", shape.hidden, width, False)
        self.kv_norm = Weight(latent.kv_rank)
        up, down = self.heads * shape.head_dim, latent.kv_rank + latent.rope_dim
        self.q_up = block_linear(shape, "q_up", width, up, False)
        self.kv_down = block_linear(shape, "kv_down", shape.hidden, down, False)
        kv_dim = latent.nope_dim + latent.value_dim
        self.kv_up = block_linear(shape, "kv_up", latent.kv_rank, self.heads * kv_dim, False)
        self.o = block_linear(shape, "o", self.heads * latent.value_dim, shape.hidden, False)

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the attention output, [N, D]."""
        ops, shape, latent = self.operations, self.shape, self.latent
        if latent.query_rank is None:
            q_NR = x_ND
            (kv,) = ops.project_alike(x_ND, (self.kv_down,))
        else:
            q_NR, kv = ops.project_alike(x_ND, (self.q_down, self.kv_down))
            q_NR = ops.norm(q_NR, self.q_norm.weight, None, shape.norm_eps)
        kv_NR, shared_NP = kv.split((latent.kv_rank, latent.rope_dim), dim=-1)
        kv_NR = ops.norm(kv_NR, self.kv_norm.weight, None, shape.norm_eps)
        attended = ops.attend_latent(self, q_NR, kv_NR, shared_NP, batch)
        return ops.project_attended(attended, self.o)

    def attended(
        self, q_NR: torch.Tensor, kv_NR: torch.Tensor, shared_NP: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        """Return attention over the heads that are made of the narrow vectors, [N, H * value_dim].

        `shared_NP` is the part of keys that all heads share, not yet turned by its position.
        """
        ops, shape, latent = self.operations, self.shape, self.latent
        q = self._heads(ops.project_in(q_NR, (self.q_up,)), batch)
        kv = self._heads(ops.project_in(kv_NR, (self.kv_up,)), batch)
        shared = ops.share_among_heads(shared_NP)
        shared = shared.view(batch.num_positions, batch.num_sequences, 1, latent.rope_dim)
        q_own, q_turned = q.split((latent.nope_dim, latent.rope_dim), dim=-1)
        k_own, v = kv.split((latent.nope_dim, latent.value_dim), dim=-1)
        cos_TE, sin_TE = ops.rotary_tables(shape, batch, q_NR)
        shared = ops.rotate(shared, cos_TE, sin_TE)
        q = torch.cat((q_own, ops.rotate(q_turned, cos_TE, sin_TE)), dim=-1)
        k = torch.cat((k_own, shared.expand(-1, -1, self.heads, -1)), dim=-1)
        v = fn.pad(v, (0, shape.head_dim - latent.value_dim))
        out = ops.attend(q, k, v, shape, batch).view(-1, self.heads, shape.head_dim)
        return out[..., : latent.value_dim].flatten(1)

    def _heads(self, x: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return x as [T, B, H, width of a head]."""
        return x.view(batch.num_positions, batch.num_sequences, self.heads, -1)
