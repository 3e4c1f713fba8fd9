# SPDX-License-Identifier: Apache-2.0
"""The steps of a decoder over a cache of keys, on one of the ranks of a tensor-parallel group.

Split: the weights as in training (`parallel/tensor.py`); the cache by key/value heads, each rank
       keeps those of its own. Of latent attention every rank keeps the narrow vector of a token,
       which all heads read. Of experts each rank has a share, or a piece of each; every rank has
       all tokens, so none travels to an expert.
Sent:  an all-reduce of [N, D] after the embedding, after attention and after the MLP, and after
       the experts of a rank; two numbers of a token where queries and keys are normed over all
       heads.
Bytes: `generated_bytes` in `tests/inference/sent_bytes.py`.
Must divide: tp | heads, kv_heads, ffn (the vocabulary is padded); ep is 1 or tp.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Pope et al., "Efficiently Scaling
       Transformer Inference", 2022, section 3.

Attention is forward only. It is PyTorch's fused one where nothing stands against it; scores one by
one where they are capped, or where values are not as wide as keys (latent attention). Weights are
computed in at least float32. Of a prompt a few queries are taken at a time, so that scores stay
small.

Shape suffixes: see `models/operations.py`; also R kv_rank, U width of a value, W numbers of a token
in the cache; in attention T queries of a prompt, B sequences, S keys, H query heads, K key/value
heads, R query heads of a key, E width of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.attention_mask import AttentionMask
from echelon.core.experts import Balance
from echelon.core.model_shape import ModelShape
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.inference.cache import CacheBatch, KindCaches
from echelon.models.attention.reference import visible
from echelon.models.batch import TokenBatch
from echelon.models.moe import (
    Expert,
    MixtureOfExperts,
    choose_experts,
    gates_of,
    router_logits,
    scores_of,
)
from echelon.models.operations import AttentionHeads, LatentProjections, Operations
from echelon.models.precision import at_least_fp32, widened
from echelon.models.rotary import rotary_key, rotary_tables
from echelon.parallel.kernels.width_norm import inverse_rms
from echelon.parallel.transport.collectives import Group

JoinedLinear = tuple[torch.Tensor, torch.Tensor | None]
"""The weights, and the biases, of layers that read the same input, one below the other."""

_WEIGHT_FIRST_ROWS = 4
"""Rows of x up to which a CPU multiplies W by x's transpose in half of the time of x W' (fp32, one
thread, 512 to 5632 outputs). With one row both are as fast as memory."""

RowParts = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""What makes keys and values of what tokens keep."""


class CacheOperations(Operations):
    """Compute the steps of a decoder whose earlier keys are in a cache."""

    def __init__(
        self,
        group: Group,
        *,
        splits_experts: bool,
        fp8: bool,
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> None:
        """Split layers over `group`; `splits_experts`: what its ranks make of experts is summed.

        `fp8`: linear layers of blocks multiply 8-bit numbers, each in its own way. Loops over large
        tensors take `pieces`.

        `joined` and `biases` are set by who makes the weights (`weights.py`), `caches` by who knows
        how many positions there will be; `balance` and `router_biases` say how tokens are routed.
        `length` is that of the sequences of training: longrope goes by it.
        """
        self.group, self._splits_experts, self._fp8 = group, splits_experts, fp8
        self.pieces = pieces
        self.joined: dict[int, JoinedLinear] = {}
        self.biases: dict[int, torch.Tensor] = {}
        self.balance = Balance()
        self.router_biases: dict[int, torch.Tensor] = {}
        self.length = 0
        self._caches: KindCaches | None = None
        self._layer = 0
        self._tables: tuple[TokenBatch, dict[object, tuple[torch.Tensor, torch.Tensor]]] | None
        self._tables = None

    @property
    def caches(self) -> KindCaches:
        """Return the caches of this rank."""
        assert self._caches is not None, "a cache is made before the first token is read"
        return self._caches

    @caches.setter
    def caches(self, caches: KindCaches) -> None:
        self._caches = caches

    def enter(self, unit: str, x: torch.Tensor | None) -> torch.Tensor | None:
        """Note which block begins: its keys have a pool of their own."""
        _, _, layer = unit.partition("layers.")
        if layer:
            self._layer = int(layer)
        return x

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x_ND: each rank looks up the rows that it has."""
        group = self.group
        if group.size == 1:
            return super().embed(weight_VD, positions, batch)
        local_N = batch.tokens_N - group.index * len(weight_VD)
        elsewhere_N = (local_N < 0) | (local_N >= len(weight_VD))
        x_ND = fn.embedding(local_N.masked_fill(elsewhere_N, 0), weight_VD)
        x_ND.masked_fill_(elsewhere_N[:, None], 0.0)
        group.all_reduce(x_ND, name="embedding.forward").wait()
        return x_ND if positions is None else x_ND + positions[batch.positions_T]

    def norm(
        self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> torch.Tensor:
        """Return x normalised over its last dim, by one operator where there is no bias."""
        if bias is not None:
            return super().norm(x, weight, bias, eps)
        wide = widened(x)
        return fn.rms_norm(wide, (x.shape[-1],), widened(weight), eps).to(x.dtype)

    def normed_heads(
        self, q: torch.Tensor, k: torch.Tensor, heads: AttentionHeads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys with their norms; of all heads, other ranks have parts."""
        shape = heads.shape
        if shape.qk_norm_over == "head" or self.group.size == 1:
            return super().normed_heads(q, k, heads)
        wide = [widened(one.flatten(-2)) for one in (q, k)]
        inverses = inverse_rms(wide, shape.norm_eps, self.group)
        normed_q, normed_k = (
            (one * inverse * widened(norm.weight)).to(q.dtype)
            for one, inverse, norm in zip(wide, inverses, heads.norms, strict=True)
        )
        return normed_q.view(q.shape), normed_k.view(k.shape)

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        """Return the outputs of layers that read the same x, by one product."""
        joined = self.joined.get(id(linears[0]))
        return super().project_in(x_ND, linears) if joined is None else product(x_ND, *joined)

    def project_out(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return the sum of what all ranks make of their part of x, [N, D]."""
        y_ND = linear(x) if self._fp8 else product(x, linear.weight, linear.bias)
        if self.group.size == 1:
            return y_ND
        self.group.all_reduce(y_ND, name="row.forward").wait()
        bias = self.biases.get(id(linear))
        return y_ND if bias is None else y_ND + bias

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the logits of the ids that this rank has."""
        return widened(product(x_ND, weight_VD, None))

    def rotary_tables(
        self, shape: ModelShape, batch: TokenBatch, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of each token's own position, made once for all blocks of a kind."""
        assert isinstance(batch, CacheBatch)
        if self._tables is None or self._tables[0] is not batch:
            self._tables = batch, {}
        found, key = self._tables[1], rotary_key(shape, self.length)
        if key not in found:
            wide = at_least_fp32(like.dtype)
            found[key] = rotary_tables(
                shape, batch.positions_N, wide, like.device, length=self.length
            )
        return found[key]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
        *,
        sinks_H: nn.Parameter | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache, and return attention over it, [N, H * hd]."""
        q_NHE, k_NKE, v_NKE = q[:, 0], k[:, 0], v[:, 0]
        num_heads, head_dim = k_NKE.shape[1:]
        rows_NW = torch.cat((k_NKE.flatten(1), v_NKE.flatten(1)), dim=1)
        attention = _attention(shape, self.pieces, sinks_H)

        def parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            k_and_v = rows.unflatten(-1, (2, num_heads, head_dim))
            return k_and_v.select(-3, 0), k_and_v.select(-3, 1)

        return self._over_cache(q_NHE, rows_NW, parts, attention, batch).flatten(1)

    def attend_latent(
        self,
        latent: LatentProjections,
        q_NR: torch.Tensor,
        kv_NR: torch.Tensor,
        shared_NP: torch.Tensor,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Write the narrow vectors to the cache, and return attention over them, [N, H * U].

        A query's own part goes through the layer that would make keys of the vectors, and what it
        finds through the part of it that would make values: no head's key is ever made
        (DeepSeek-V2, 2024, section 2.1.2).
        """
        shape, sizes = latent.shape, latent.latent
        q_NHE = self.project_in(q_NR, (latent.q_up,)).unflatten(-1, (latent.heads, -1))
        q_own, q_turned = q_NHE.split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        tables = self.rotary_tables(shape, batch, q_NR)
        q_turned = self.rotate(q_turned[:, None], *tables)[:, 0]
        shared_NP = self.rotate(shared_NP[:, None, None], *tables)[:, 0, 0]
        up_HUR = latent.kv_up.weight.unflatten(0, (latent.heads, -1))
        to_keys, to_values = up_HUR.split((sizes.nope_dim, sizes.value_dim), dim=1)
        q_NHW = torch.cat((torch.einsum("nhe,her->nhr", q_own, to_keys), q_turned), dim=-1)

        def parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys = rows.unsqueeze(-2)
            return keys, keys[..., : sizes.kv_rank]

        rows_NW = torch.cat((kv_NR, shared_NP), dim=1)
        found_NHR = self._over_cache(q_NHW, rows_NW, parts, _attention(shape, self.pieces), batch)
        return torch.einsum("nhr,hur->nhu", found_NHR, to_values).flatten(1)

    def _over_cache(
        self,
        q_NHW: torch.Tensor,
        rows_NW: torch.Tensor,
        parts: RowParts,
        attention: CachedAttention,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Write the rows of the batch; return what its queries find, [N, H, width of a value]."""
        assert isinstance(batch, CacheBatch)
        kind = self.caches.kind_of(self._layer)
        cache, places = self.caches.caches[kind], batch.places[kind]
        kept = rows_NW if places.kept_M is None else rows_NW[places.kept_M]
        cache.write(self._layer, places.write_M, kept)
        if places.read_BS is None:
            k, v = parts(rows_NW)
            found = [attention.of_prompt(q_NHW[one], k[one], v[one]) for one in batch.spans]
            return torch.cat(found)
        rows = cache.read(self._layer, places.read_BS)
        k, v = parts(rows.view(len(q_NHW), -1, rows.shape[-1]))
        return attention.of_next(q_NHW, k, v, places.seen_BS)

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return what its experts make of each token; none has too little room for any.

        Room is counted by sequence, and a text that has just begun would have hardly any.
        """
        experts = mixture.routing
        scores_NE = scores_of(router_logits(mixture, x_ND), experts)
        bias_E = self.router_biases.get(mixture.layer)
        at_N = batch.positions_T
        chosen_NK = choose_experts(scores_NE, bias_E, at_N, experts, self.balance)
        gates_NK = gates_of(scores_NE, chosen_NK, experts)
        y_ND = torch.zeros_like(x_ND)
        for number in chosen_NK.unique().tolist():
            if str(number) in mixture.experts:
                rows, places = (chosen_NK == number).nonzero(as_tuple=True)
                expert = mixture.experts[str(number)]
                assert isinstance(expert, Expert)
                gates_R = gates_NK[rows, places]
                # Each piece has the whole bias, which the sum is to have once.
                biased = expert.pieces == 1 or self.group.index == 0
                y_ND.index_add_(0, rows, expert.weighted(x_ND[rows], gates_R, biased=biased))
        if self._splits_experts:
            self.group.all_reduce(y_ND, name="experts.forward").wait()
        return y_ND + mixture.shared(x_ND) if experts.shared_experts else y_ND


def product(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of a linear layer, [N, O], by the product that is faster for few rows."""
    if x_NI.device.type != "cpu" or not 1 < len(x_NI) <= _WEIGHT_FIRST_ROWS:
        return fn.linear(x_NI, weight_OI, bias_O)
    y_NO = (weight_OI @ x_NI.t()).t().contiguous()
    return y_NO if bias_O is None else y_NO + bias_O


def _attention(
    shape: ModelShape, pieces: PieceSizes, sinks_H: nn.Parameter | None = None
) -> CachedAttention:
    return CachedAttention(
        scale=shape.score_scale,
        mask=shape.mask,
        soft_cap=shape.soft_cap,
        sinks_H=sinks_H,
        prompt_queries=pieces.prompt_queries,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttention:
    """Say how scores become weights."""

    scale: float
    mask: AttentionMask
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None
    prompt_queries: int = TRAINING_PIECES.prompt_queries

    def of_prompt(
        self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKU: torch.Tensor
    ) -> torch.Tensor:
        """Return what the queries of a prompt find in its own keys, [T, H, U]."""
        num_heads, length = k_TKE.shape[1], len(q_THE)
        q_KRTE = q_THE.unflatten(1, (num_heads, -1)).permute(1, 2, 0, 3)
        k_KTE, v_KTU = k_TKE.transpose(0, 1), v_TKU.transpose(0, 1)
        at = torch.arange(length, device=q_THE.device)
        found: list[torch.Tensor] = []
        for start in range(0, length, self.prompt_queries):
            rows = slice(start, min(start + self.prompt_queries, length))
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
