# SPDX-License-Identifier: Apache-2.0
"""One decoder for Llama, Mistral, Qwen, GPT-2, Gemma, DeepSeek and others: settings, not classes.

The decoder is written for one device and unaware of ranks; it asks an `Operations` for every step.
It can hold all blocks or only some (a pipeline stage): the first part also embeds, the last part
also norms and gives the loss. Parameter names are those of `core.parameters`.

A token keeps `kv_rank` numbers that all its keys and values are made of, and one key part of
`rope_dim` that carries its position and that all heads share; queries pass through `query_rank`
numbers of their own, or come straight out of the stream (DeepSeek-V2-Lite). So a head's key is
[own | shared], with rotary positions in the second part only, and its value, of `value_dim`, may be
narrower than a key. Attention here is one for keys and values of equal width: values get zeros
behind them, and the output loses them again.
Source: DeepSeek-V2, 2024, section 2.1; DeepSeek-V3, 2024, section 2.1.1.

Boundaries are what passes between the parts: a block reads the residual stream, and each of its
parts has an output. A forward pass that goes wrong goes wrong between two of them, and so does a
backward pass.

Shape suffixes: see `models/operations.py`; also N tokens (sequence first), R rank, P rope_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as fn
from torch.utils.hooks import RemovableHandle

from echelon.core.model_shape import LatentAttention as LatentShape
from echelon.core.model_shape import ModelShape
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.models.batch import TokenBatch
from echelon.models.modules import TensorShare, Weight, block_linear
from echelon.models.moe import MixtureOfExperts
from echelon.models.operations import AttentionHeads, LossHead, Operations

BlockRunner = Callable[["Block", torch.Tensor, TokenBatch], torch.Tensor]


class Norm(Weight):
    """Normalise over the last dim: RMSNorm, or LayerNorm where the shape says so."""

    def __init__(self, shape: ModelShape, operations: Operations, *, again: bool = False) -> None:
        """Make the norm of the residual width; `again`: backward may make its output again."""
        super().__init__(shape.hidden, bias=shape.norm == "layernorm")
        self.operations, self.again = operations, again
        self.eps = shape.norm_eps

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return x normalised."""
        return self.normed(x_ND)

    def normed(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return x normalised, made again in backward where that is asked for."""
        return (
            self.operations.operator("norm", self._make, x_ND) if self.again else self._make(x_ND)
        )

    def _make(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.operations.norm(x_ND, self.weight, self.bias, self.eps)


class BranchNorm(Norm):
    """The norm at the head of a branch, with the residual stream that goes around it."""

    def forward(
        self, x_ND: torch.Tensor, added_ND: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream, x with the output of the branch before added, and its norm."""
        return self.operations.branch(x_ND, added_ND, self)


class MLP(nn.Module):
    """The feed-forward part: SwiGLU where the shape is gated, else one activation."""

    def __init__(
        self, shape: ModelShape, operations: Operations, ffn: int, *, again: bool = False
    ) -> None:
        """Make the projections for `ffn` inner columns: all, or those of one tensor rank.

        `again`: backward may make what is between them again.
        """
        super().__init__()
        self.shape, self.operations, self.again = shape, operations, again
        if shape.gated:
            self.gate = block_linear(shape, "gate", shape.hidden, ffn, shape.mlp_bias)
        self.up = block_linear(shape, "up", shape.hidden, ffn, shape.mlp_bias)
        self.down = block_linear(shape, "down", ffn, shape.hidden, shape.mlp_bias)

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch | None = None) -> torch.Tensor:
        """Return the output of the MLP, [N, D]; which tokens these are does not matter."""
        ops = self.operations
        inner_NF = ops.operator("mlp", self._inner, x_ND) if self.again else self._inner(x_ND)
        return ops.project_out(inner_NF, self.down)

    def _inner(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return what the last layer reads, [N, F]."""
        ops = self.operations
        linears = (self.gate, self.up) if self.shape.gated else (self.up,)
        columns = ops.project_in(x_ND, linears)
        if self.again:
            return ops.operator("activation", self._activate, columns)
        return self._activate(columns)

    def _activate(self, columns: torch.Tensor) -> torch.Tensor:
        if self.shape.gated:
            return self.operations.gate(columns, self.shape.activation)
        return self.operations.activate(columns, self.shape.activation)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention with rotary positions and optional QK-norm."""

    def __init__(self, shape: ModelShape, operations: Operations, tp: int) -> None:
        """Make the projections for the heads of one of `tp` tensor ranks.

        `shape` is that of the block.
        """
        super().__init__()
        query, kv = shape.query_dim // tp, shape.kv_dim // tp
        self.shape, self.operations = shape, operations
        self.sinks = Weight(shape.heads // tp) if shape.sinks else None
        self.q = block_linear(shape, "q", shape.hidden, query, shape.qkv_bias)
        self.k = block_linear(shape, "k", shape.hidden, kv, shape.qkv_bias)
        self.v = block_linear(shape, "v", shape.hidden, kv, shape.qkv_bias)
        if shape.qk_norm:
            whole = shape.qk_norm_over == "width"
            self.q_norm = Weight(query if whole else shape.head_dim)
            self.k_norm = Weight(kv if whole else shape.head_dim)
        self.o = block_linear(shape, "o", query, shape.hidden, shape.output_bias)

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the attention output, [N, D]."""
        ops = self.operations
        qkv = ops.project_in(x_ND, (self.q, self.k, self.v))
        attended = ops.operator("attention", partial(self._attend, batch=batch), qkv)
        return ops.project_attended(attended, self.o)

    def _attend(self, qkv: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return what queries, keys and values side by side give, [N, H * hd]."""
        ops, shape = self.operations, self.shape
        head_dim = shape.head_dim
        qkv = qkv.view(batch.num_positions, batch.num_sequences, -1, head_dim)
        heads, kv_heads = self.q.out_features // head_dim, self.k.out_features // head_dim
        norms = (self.q_norm, self.k_norm) if shape.qk_norm else ()
        own = AttentionHeads(shape=shape, num_queries=heads, num_keys=kv_heads, norms=norms)
        q, k, v = ops.heads(qkv, own, batch)
        if self.sinks is None:
            return ops.attend(q, k, v, shape, batch)
        return ops.attend(q, k, v, shape, batch, sinks_H=self.sinks.weight)


class Block(nn.Module):
    """One transformer block: attention and an MLP, in turn or side by side, with their norms."""

    def __init__(
        self, shape: ModelShape, operations: Operations, index: int, share: TensorShare
    ) -> None:
        """Make block `index` of the model, or a rank's share of it."""
        super().__init__()
        self.index, self.dropout, self.operations = index, shape.dropout, operations
        self.factor, tp = shape.multipliers.residual, share.tp
        self.parallel = shape.residual != "sequential"
        experts, norms = shape.layer_has_experts(index), shape.norms
        again = {"attention_norm": shape.residual != "parallel-one-norm", "mlp_norm": not experts}
        if "attention_norm" in norms:
            self.attention_norm = BranchNorm(shape, operations, again=again["attention_norm"])
        own = shape.of_layer(index)
        if own.latent is None:
            self.attention = GroupedQueryAttention(own, operations, tp)
        else:
            self.attention = MultiHeadLatentAttention(own, own.latent, operations, tp)
        if "mlp_norm" in norms:
            kind = Norm if self.parallel else BranchNorm
            self.mlp_norm = kind(shape, operations, again=again["mlp_norm"])
        if experts:
            self.mlp = mixture_of_experts(shape, operations, index, share)
        else:
            self.mlp = MLP(shape, operations, shape.ffn // tp, again=True)
        if shape.norm_place != "before":
            self.attention_post_norm = Norm(shape, operations)
            self.mlp_post_norm = Norm(shape, operations)

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the residual stream after this block, [N, D]."""
        ops = self.operations
        x_ND, normed_ND = self._at_head("attention_norm", x_ND, None)
        y_ND = self.attention(normed_ND, batch)
        y_ND = self._to_add("attention", y_ND, batch)
        if self.parallel:
            # What attention adds goes on in its place: one tensor lives while the MLP runs.
            y_ND = ops.add(x_ND, y_ND)
            if "mlp_norm" in self._modules:
                normed_ND = self.mlp_norm(x_ND)
            x_ND = y_ND
        else:
            x_ND, normed_ND = self._at_head("mlp_norm", x_ND, y_ND)
        y_ND = self.mlp(normed_ND, batch)
        return ops.add(x_ND, self._to_add("mlp", y_ND, batch))

    def _at_head(
        self, norm: str, x_ND: torch.Tensor, added_ND: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream at the head of a branch, and what the branch reads."""
        if norm in self._modules:
            return self._modules[norm](x_ND, added_ND)  # type: ignore[misc]
        if added_ND is not None:
            x_ND = self.operations.add(x_ND, added_ND)
        return x_ND, x_ND

    def _to_add(self, branch: str, y_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return what a branch adds to the stream, made of what its last layer gives."""
        ops, norm = self.operations, self._modules.get(f"{branch}_post_norm")
        y_ND = ops.multiply(y_ND if norm is None else norm(y_ND), self.factor)
        return ops.dropout(y_ND, self.dropout, f"layers.{self.index}.{branch}", batch)


def mixture_of_experts(
    shape: ModelShape, operations: Operations, layer: int, share: TensorShare
) -> MixtureOfExperts:
    """Return a rank's share of the experts of a layer, with those that every token meets."""
    experts = shape.experts
    assert experts is not None, "a block without experts has a dense MLP"
    shared = None
    if experts.shared_experts:
        shared = MLP(shape, operations, experts.ffn * experts.shared_experts // share.tp)
    return MixtureOfExperts(shape, operations.mixture, layer, share, shared)


def run_block(block: Block, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Run a block and keep what its backward needs."""
    return block(x_ND, batch)


class Decoder(nn.Module):
    """A decoder, or the part of one that a pipeline stage owns."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        operations: Operations | None = None,
        blocks: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
        share: TensorShare | None = None,
    ) -> None:
        """Make the given blocks (default: all), uninitialised, or a rank's share of them."""
        super().__init__()
        self.shape, self.operations = shape, operations or Operations()
        self.first, self.last = first, last
        indices = range(shape.layers) if blocks is None else blocks
        share = share or TensorShare()
        vocab = -(-shape.vocab // share.tp)
        ops = self.operations
        if first or (last and shape.tied):
            self.embedding = Weight(vocab, shape.hidden)
        if first and shape.positions == "learned":
            self.positions = Weight(shape.max_positions, shape.hidden)
        self.layers = nn.ModuleDict({str(i): Block(shape, ops, i, share) for i in indices})
        if last:
            self.norm = Norm(shape, ops)
            if not shape.tied:
                self.head = Weight(vocab, shape.hidden)
        self.run_block: BlockRunner = run_block

    @property
    def head_weight(self) -> nn.Parameter:
        """Return the matrix [V, D] that gives the logits."""
        return (self.embedding if self.shape.tied else self.head).weight

    @property
    def loss_head(self) -> LossHead:
        """Return what makes the logits."""
        return LossHead(
            weight_VD=self.head_weight,
            factor=self.shape.multipliers.logits,
            soft_cap=self.shape.final_soft_cap,
        )

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the logits of normed rows, as `Operations.logits` has them."""
        logits_NV = self.operations.logits(x_ND, self.head_weight)
        logits_NV = self.operations.multiply(logits_NV, self.shape.multipliers.logits)
        return self.operations.cap(logits_NV, self.shape.final_soft_cap)

    def hidden(self, x_ND: torch.Tensor | None, batch: TokenBatch) -> torch.Tensor:
        """Return the residual stream after the blocks; `x_ND` is what the stage before gave."""
        ops = self.operations
        if self.first:
            ops.enter(UNIT_EMBEDDING, None)
            positions = self.positions.weight if self.shape.positions == "learned" else None
            x_ND = ops.embed(self.embedding.weight, positions, batch)
            x_ND = ops.multiply(x_ND, self.shape.multipliers.embedding)
            x_ND = ops.dropout(x_ND, self.shape.dropout, "embedding", batch)
            x_ND = ops.leave(UNIT_EMBEDDING, x_ND)
        for index, block in self.layers.items():
            x_ND = require_stream(ops.enter(f"layers.{index}", x_ND))
            x_ND = ops.leave(f"layers.{index}", self.run_block(cast(Block, block), x_ND, batch))
        return require_stream(x_ND)

    def forward(
        self, x_ND: torch.Tensor | None, batch: TokenBatch, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Return x_ND for the next stage or, on the last part, scale x the sum of token losses."""
        out_ND = self.hidden(x_ND, batch)
        if not self.last:
            return out_ND
        ops = self.operations
        out_ND = require_stream(ops.enter(UNIT_HEAD, out_ND))
        loss = ops.head_loss(self.norm(out_ND), self.loss_head, batch.labels_N, scale)
        return ops.leave(UNIT_HEAD, loss)


def require_stream(x_ND: torch.Tensor | None) -> torch.Tensor:
    """Return the residual stream, which is there in every unit but the embedding."""
    assert x_ND is not None, "a stage that is not the first needs its input"
    return x_ND


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


INPUT, OUTPUT = "input", "output"

PARTS = (
    *("attention_norm", "attention", "attention_post_norm"),
    *("mlp_norm", "mlp", "mlp_post_norm"),
)
"""The modules of a block whose outputs are boundaries, in the order of the forward pass: those that
a block has."""

FINAL_NORM = "norm"

Hear = Callable[[str, torch.Tensor, TokenBatch], None]
"""Learn the name of a boundary, what passes there, [N, D], and of which tokens."""


def listen_to_boundaries(decoder: Decoder, hear: Hear) -> Sequence[RemovableHandle]:
    """Let `hear` know of everything that passes a boundary of `decoder`, until it is removed.

    A block that is recomputed is heard again.
    """
    now: list[TokenBatch] = []
    handles: list[RemovableHandle] = []
    for module in decoder.layers.values():
        assert isinstance(module, Block), "a decoder is made of blocks"
        handles += _listen_to_block(module, hear, now)
    if decoder.last:

        def before_all(_: nn.Module, inputs: tuple[torch.Tensor | None, TokenBatch]) -> None:
            # A stage may have no block that would say which batch it is.
            now[:] = [inputs[1]]

        def after_norm(_: nn.Module, _inputs: Any, y_ND: torch.Tensor) -> None:
            if now:
                hear(FINAL_NORM, y_ND, now[0])

        handles.append(decoder.register_forward_pre_hook(before_all))
        handles.append(decoder.norm.register_forward_hook(after_norm))
    return handles


def _listen_to_block(block: Block, hear: Hear, now: list[TokenBatch]) -> list[RemovableHandle]:
    """Listen to one block; `now` holds the batch that the decoder works on."""
    site = f"layers.{block.index}"

    def before(_: nn.Module, inputs: tuple[torch.Tensor, TokenBatch]) -> None:
        now[:] = [inputs[1]]
        hear(f"{site}.{INPUT}", *inputs)

    def after(part: str) -> Callable[[nn.Module, Any, Any], None]:
        # A norm at the head of a branch gives the stream, too, which is heard elsewhere.
        return lambda _, _inputs, y: hear(
            f"{site}.{part}", y[1] if isinstance(y, tuple) else y, now[0]
        )

    return [
        block.register_forward_pre_hook(before),
        *(
            getattr(block, part).register_forward_hook(after(part))
            for part in PARTS
            if hasattr(block, part)
        ),
        block.register_forward_hook(after(OUTPUT)),
    ]
