# SPDX-License-Identifier: Apache-2.0
"""The operations that a decoder is made of: here in plain PyTorch, for one device.

These are the reference: short, derived by autograd, and what the prover's oracle computes with.
`parallel/operations.py` overrides them with kernels that write gradients by hand and talk to other
ranks; the decoder itself is the same code for both. Activations have the dtype of the parameters;
norms, rotations, softmax and loss are computed in at least float32 and rounded once.

Shape suffixes: B sequences, T positions, N = T * B tokens (sequence first), D hidden, H query
heads, K key/value heads, E = head_dim / 2, F inner width of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.model_shape import Activation, LatentAttention, ModelShape
from echelon.models.attention.reference import ScoreForm, attention_reference, visible
from echelon.models.batch import IGNORED_LABEL, TokenBatch, positions_of
from echelon.models.counter_random import make_key, uniform
from echelon.models.modules import EmptyLinear, Weight
from echelon.models.moe import MixtureOfExperts, RoutingNotes, mixture_reference
from echelon.models.precision import LOW_PRECISION, at_least_fp32, widened
from echelon.models.rotary import rotary_tables

GELU_FORMS = {"gelu": "tanh", "gelu-exact": "none"}
"""What PyTorch calls the forms of GELU."""


class NormOfStream(Protocol):
    """A norm at the head of a branch: a module of `models/decoder.py`."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    eps: float
    again: bool

    def normed(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the norm of the stream."""
        ...


class LatentProjections(Protocol):
    """Multi-head latent attention: a module of `models/decoder.py`."""

    shape: ModelShape
    latent: LatentAttention
    heads: int
    q_up: EmptyLinear
    kv_up: EmptyLinear

    def attended(
        self, q_NR: torch.Tensor, kv_NR: torch.Tensor, shared_NP: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        """Return attention over the heads that are made of the narrow vectors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    """Say which heads a rank has of attention; `norms` are those of queries and keys, if any."""

    shape: ModelShape
    num_queries: int
    num_keys: int
    norms: tuple[Weight, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """Hold the matrix that makes logits, what they are multiplied by, and the cap on them, if any.

    The cap is that of what the factor gives.
    """

    weight_VD: nn.Parameter
    factor: float = 1.0
    soft_cap: float | None = None


class Operations:
    """Compute every step of a decoder on one device."""

    @cached_property
    def routing(self) -> RoutingNotes:
        """Say by which rule experts are chosen (by scores alone), and keep how they were."""
        return RoutingNotes()

    def enter(self, unit: str, x: torch.Tensor | None) -> torch.Tensor | None:
        """Return x where a forward pass begins to use the weights of a unit.

        A unit is "embedding", a block ("layers.3") or "head", as `layout/buckets.py` names them.
        Who holds weights only while they are used (ZeRO stage 3) does so from `enter` to `leave`.
        """
        return x

    def leave(self, unit: str, y: torch.Tensor) -> torch.Tensor:
        """Return y, the output of a unit, where a forward pass ends to use its weights."""
        return y

    def operator(
        self, name: str, make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """Return make(x), an operator of a block; whoever recomputes keeps x and makes it again.

        The only reader of what it returns is the linear layer that is called next.
        """
        return make(x)

    def embed(
        self, weight_VD: nn.Parameter, positions: nn.Parameter | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x_ND: token vectors, plus learned position vectors where the model has them."""
        x_ND = fn.embedding(batch.tokens_N, weight_VD)
        if positions is not None:
            x_TD = positions[batch.positions_T]
            x_ND = x_ND + x_TD.repeat_interleave(batch.num_sequences, dim=0)
        return x_ND

    def norm(
        self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, eps: float
    ) -> torch.Tensor:
        """Return x normalised over its last dim: LayerNorm with a bias, RMSNorm without."""
        wide = widened(x)
        if bias is not None:
            shape = (x.shape[-1],)
            y = fn.layer_norm(wide, shape, widened(weight), widened(bias), eps)
        else:
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            y = wide * scale * widened(weight)
        return y.to(x.dtype)

    def branch(
        self, x_ND: torch.Tensor, added_ND: torch.Tensor | None, norm: NormOfStream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream at the head of a branch, and its norm, which the branch reads.

        The stream is x, with the output of the branch before added, where there is one.
        """
        if added_ND is not None:
            x_ND = self.add(x_ND, added_ND)
        return x_ND, norm.normed(x_ND)

    def head_norm(self, x: torch.Tensor, weight: nn.Parameter, eps: float) -> torch.Tensor:
        """Return x of shape [..., head_dim] with each head normalised (QK-norm)."""
        return self.norm(x, weight, None, eps)

    def width_norm(self, x: torch.Tensor, weight: nn.Parameter, eps: float) -> torch.Tensor:
        """Return x of shape [..., heads, head_dim] normalised over all heads together."""
        return self.norm(x.flatten(-2), weight, None, eps).view(x.shape)

    def normed_heads(
        self, q: torch.Tensor, k: torch.Tensor, heads: AttentionHeads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys with their norms, over each head or over all heads together."""
        shape, (of_queries, of_keys) = heads.shape, heads.norms
        norm = self.head_norm if shape.qk_norm_over == "head" else self.width_norm
        q = norm(q, of_queries.weight, shape.norm_eps)
        return q, norm(k, of_keys.weight, shape.norm_eps)

    def project_in(self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]) -> torch.Tensor:
        """Return the outputs of `linears` (that read the same x) side by side, [N, sum of outs]."""
        return torch.cat([linear(x_ND) for linear in linears], dim=-1)

    def project_alike(
        self, x_ND: torch.Tensor, linears: Sequence[nn.Linear]
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of `linears` (that read the same x), which no rank has a part of."""
        return tuple(linear(x_ND) for linear in linears)

    def share_among_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [N, ...], which all heads use."""
        return x

    def project_out(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return x through the linear layer that writes to the residual stream, [N, D]."""
        return linear(x)

    def project_attended(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """Return the output of attention through its linear layer, [N, D]."""
        return self.project_out(x, linear)

    def rotary_tables(
        self, shape: ModelShape, batch: TokenBatch, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos_TE and sin_TE for the positions of `batch`, where `like` is."""
        positions_T = positions_of(batch.runs, torch.device("cpu"))
        dtype, length = at_least_fp32(like.dtype), batch.whole_length
        return rotary_tables(shape, positions_T, dtype, like.device, length=length)

    def rotate(self, x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        """Return x [T, B, heads, head_dim] with each half-pair turned by its position."""
        first, second = widened(x).chunk(2, dim=-1)
        cos, sin = cos_TE[:, None, None], sin_TE[:, None, None]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)

    def heads(
        self, qkv: torch.Tensor, heads: AttentionHeads, batch: TokenBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v of the projections side by side [T, B, H + 2 K, head_dim].

        Queries and keys are normed and turned by their position where the model does so.
        """
        shape = heads.shape
        q, k, v = qkv.split((heads.num_queries, heads.num_keys, heads.num_keys), dim=2)
        if heads.norms:
            q, k = self.normed_heads(q, k, heads)
        if shape.positions == "rope":
            cos_TE, sin_TE = self.rotary_tables(shape, batch, qkv)
            q, k = self.rotate(q, cos_TE, sin_TE), self.rotate(k, cos_TE, sin_TE)
        return q, k, v

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
        """Return attention of q [T,B,H,hd] over k, v [T,B,K,hd], as [N, H * hd].

        A query meets the keys that the mask of `shape`, which is that of its layer, and the
        documents of `batch` allow; `sinks_H` are the scores of what gives nothing, if any.
        """
        positions_T = batch.positions_T.to(q.device)
        seen = visible(positions_T, positions_T, shape.mask, batch.documents)
        scores = ScoreForm(scale=shape.score_scale, soft_cap=shape.soft_cap)
        out = attention_reference(q, k, v, seen, scores, sinks_H)[0]
        return out.reshape(q.shape[0] * q.shape[1], -1)

    def attend_latent(
        self,
        latent: LatentProjections,
        q_NR: torch.Tensor,
        kv_NR: torch.Tensor,
        shared_NP: torch.Tensor,
        batch: TokenBatch,
    ) -> torch.Tensor:
        """Return latent attention of the narrow vectors and the shared key part, [N, H * U]."""
        return latent.attended(q_NR, kv_NR, shared_NP, batch)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) * up for gate and up side by side, [N, F] (Shazeer, 2020)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return activated(gate, activation) * up

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of an MLP without a gate."""
        return activated(x, activation)

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return the weighted sum of what its experts make of each token, [N, D]."""
        return mixture_reference(x_ND, mixture, batch, self.routing)

    def add(self, x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
        """Return the residual stream x with a block's output y added."""
        return x_ND + y_ND

    def multiply(self, x_ND: torch.Tensor, factor: float) -> torch.Tensor:
        """Return x times a factor of the model, which is often 1."""
        return x_ND if factor == 1.0 else x_ND * factor

    def dropout(
        self, x_ND: torch.Tensor, probability: float, site: str, batch: TokenBatch
    ) -> torch.Tensor:
        """Return x with elements zeroed by a mask: see `dropout_mask`."""
        if probability == 0.0 or not batch.train:
            return x_ND
        rows = torch.arange(x_ND.shape[0], device=x_ND.device)
        return apply_dropout(x_ND, rows, probability, site, batch)

    def head_loss(
        self, x_ND: torch.Tensor, head: LossHead, labels_N: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return scale x the sum of the cross-entropies of all counted tokens, a scalar."""
        logits_NV = self.multiply(self.logits(x_ND, head.weight_VD), head.factor)
        logits_NV = self.cap(logits_NV, head.soft_cap)
        total = fn.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")
        return total * scale

    def logits(self, x_ND: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Return the logits_NV of every token, ready for a softmax (ranks never build them)."""
        return widened(fn.linear(x_ND, weight_VD))

    def cap(self, logits_NV: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
        """Return c tanh(z / c) of every logit z for a cap of c; without one, the logits."""
        return logits_NV if soft_cap is None else soft_cap * torch.tanh(logits_NV / soft_cap)


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of x: silu, or gelu exactly or in its tanh form."""
    if activation == "silu":
        return fn.silu(x)
    return fn.gelu(x, approximate=GELU_FORMS[activation])


def apply_dropout(
    x_ND: torch.Tensor, rows: torch.Tensor, probability: float, site: str, batch: TokenBatch
) -> torch.Tensor:
    """Return x, the rows `rows` of the batch, with elements zeroed and the others scaled up."""
    mask = dropout_mask(rows, x_ND, probability, site, batch)
    if x_ND.dtype in LOW_PRECISION:
        # In the few digits of the mask 1 / (1 - p) is another factor; a number has all of them.
        return x_ND.masked_fill(mask == 0, 0.0) / (1.0 - probability)
    return x_ND * mask


def dropout_mask(
    rows: torch.Tensor, like: torch.Tensor, probability: float, site: str, batch: TokenBatch
) -> torch.Tensor:
    """Return the mask (0 or 1 / (1 - p)) of the rows `rows` of the batch, shaped like `like`.

    The value at (sample, position, channel) depends on nothing but these, the seed, the step and
    the site, so every layout drops the same elements.
    """
    width = like.shape[-1]
    position = batch.positions_T.to(rows.device)[rows // batch.num_sequences]
    sample = batch.sample_ids_B.to(rows.device)[rows % batch.num_sequences]
    token = sample * batch.whole_length + position
    index = token.unsqueeze(-1) * width + torch.arange(width, device=rows.device)
    keep = uniform(make_key("dropout", batch.seed, batch.step, site), index) >= probability
    return keep.to(like.dtype) / (1.0 - probability)
