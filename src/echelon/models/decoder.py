"""One decoder for Llama, Mistral, Qwen and GPT-2 shapes: a configuration, not a class, each.

The decoder is written for one device and unaware of ranks; it asks an `Operations` for every step.
It can hold all blocks or only some (a pipeline stage): the first part also embeds, the last part
also norms and gives the loss. Parameter names are those of `core.parameters`.

Shape suffixes: see `models/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.cost.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations

BlockRunner = Callable[["Block", torch.Tensor, TokenBatch], torch.Tensor]


class Weight(nn.Module):
    """Hold a weight (and a bias) under a canonical name; the operations say what they do."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        """Make an uninitialised weight of `shape`, and a bias of its first dim where asked."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None


class Norm(Weight):
    """Normalise over the last dim: RMSNorm, or LayerNorm where the shape says so."""

    def __init__(self, shape: ModelShape, operations: Operations) -> None:
        """Make the norm of the residual width."""
        super().__init__(shape.hidden, bias=shape.norm == "layernorm")
        self.operations = operations
        self.eps = shape.norm_eps

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return x normalised."""
        return self.operations.norm(x_ND, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and optional QK-norm."""

    def __init__(self, shape: ModelShape, operations: Operations, tp: int) -> None:
        """Make the projections for the heads of one of `tp` tensor ranks."""
        super().__init__()
        query, kv = shape.query_dim // tp, shape.kv_dim // tp
        self.shape, self.operations = shape, operations
        self.q = linear(shape.hidden, query, shape.qkv_bias)
        self.k = linear(shape.hidden, kv, shape.qkv_bias)
        self.v = linear(shape.hidden, kv, shape.qkv_bias)
        if shape.qk_norm:
            self.q_norm, self.k_norm = Weight(shape.head_dim), Weight(shape.head_dim)
        self.o = linear(query, shape.hidden, shape.output_bias)

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the attention output, [N, D]."""
        ops, shape = self.operations, self.shape
        qkv = ops.project_in(x_ND, (self.q, self.k, self.v))
        head_dim = shape.head_dim
        qkv = qkv.view(batch.num_positions, batch.num_sequences, -1, head_dim)
        heads, kv_heads = self.q.out_features // head_dim, self.k.out_features // head_dim
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        if shape.qk_norm:
            q = ops.head_norm(q, self.q_norm.weight, shape.norm_eps)
            k = ops.head_norm(k, self.k_norm.weight, shape.norm_eps)
        if shape.positions == "rope":
            cos_TE, sin_TE = ops.rotary_tables(shape, batch, x_ND)
            q, k = ops.rotate(q, cos_TE, sin_TE), ops.rotate(k, cos_TE, sin_TE)
        return ops.project_attended(ops.attend(q, k, v, shape, batch), self.o)


class MLP(nn.Module):
    """The feed-forward part: SwiGLU where the shape is gated, else one activation."""

    def __init__(self, shape: ModelShape, operations: Operations, tp: int) -> None:
        """Make the projections for the inner columns of one of `tp` tensor ranks."""
        super().__init__()
        ffn = shape.ffn // tp
        self.shape, self.operations = shape, operations
        if shape.gated:
            self.gate = linear(shape.hidden, ffn, shape.mlp_bias)
        self.up = linear(shape.hidden, ffn, shape.mlp_bias)
        self.down = linear(ffn, shape.hidden, shape.mlp_bias)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP, [N, D]."""
        ops = self.operations
        if self.shape.gated:
            inner_NF = ops.gate(ops.project_in(x_ND, (self.gate, self.up)))
        else:
            inner_NF = ops.activate(ops.project_in(x_ND, (self.up,)), self.shape.activation)
        return ops.project_out(inner_NF, self.down)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: ModelShape, operations: Operations, tp: int, index: int) -> None:
        """Make block `index` of the model."""
        super().__init__()
        self.index, self.dropout, self.operations = index, shape.dropout, operations
        self.attention_norm = Norm(shape, operations)
        self.attention = Attention(shape, operations, tp)
        self.mlp_norm = Norm(shape, operations)
        self.mlp = MLP(shape, operations, tp)

    def forward(self, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the residual stream after this block, [N, D]."""
        ops, site = self.operations, f"layers.{self.index}"
        y_ND = self.attention(self.attention_norm(x_ND), batch)
        x_ND = ops.add(x_ND, ops.dropout(y_ND, self.dropout, f"{site}.attention", batch))
        y_ND = self.mlp(self.mlp_norm(x_ND))
        return ops.add(x_ND, ops.dropout(y_ND, self.dropout, f"{site}.mlp", batch))


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
        tp: int = 1,
    ) -> None:
        """Make the given blocks (default: all), uninitialised, for one of `tp` tensor ranks."""
        super().__init__()
        self.shape, self.operations = shape, operations or Operations()
        self.first, self.last = first, last
        indices = range(shape.layers) if blocks is None else blocks
        vocab = -(-shape.vocab // tp)
        ops = self.operations
        if first or (last and shape.tied):
            self.embedding = Weight(vocab, shape.hidden)
        if first and shape.positions == "learned":
            self.positions = Weight(shape.max_positions, shape.hidden)
        self.layers = nn.ModuleDict({str(i): Block(shape, ops, tp, i) for i in indices})
        if last:
            self.norm = Norm(shape, ops)
            if not shape.tied:
                self.head = Weight(vocab, shape.hidden)
        self.run_block: BlockRunner = run_block

    @property
    def head_weight(self) -> nn.Parameter:
        """Return the matrix [V, D] that gives the logits."""
        return (self.embedding if self.shape.tied else self.head).weight

    def hidden(self, x_ND: torch.Tensor | None, batch: TokenBatch) -> torch.Tensor:
        """Return the residual stream after the blocks; `x_ND` is what the stage before gave."""
        ops = self.operations
        if self.first:
            ops.enter(UNIT_EMBEDDING, None)
            positions = self.positions.weight if self.shape.positions == "learned" else None
            x_ND = ops.embed(self.embedding.weight, positions, batch)
            x_ND = ops.dropout(x_ND, self.shape.dropout, "embedding", batch)
            x_ND = ops.leave(UNIT_EMBEDDING, x_ND)
        for index, block in self.layers.items():
            x_ND = entered(ops.enter(f"layers.{index}", x_ND))
            x_ND = ops.leave(f"layers.{index}", self.run_block(cast(Block, block), x_ND, batch))
        return entered(x_ND)

    def forward(
        self, x_ND: torch.Tensor | None, batch: TokenBatch, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Return x_ND for the next stage or, on the last part, scale x the sum of token losses."""
        out_ND = self.hidden(x_ND, batch)
        if not self.last:
            return out_ND
        ops = self.operations
        out_ND = entered(ops.enter(UNIT_HEAD, out_ND))
        loss = ops.head_loss(self.norm(out_ND), self.head_weight, batch.labels_N, scale)
        return ops.leave(UNIT_HEAD, loss)


def entered(x_ND: torch.Tensor | None) -> torch.Tensor:
    """Return the residual stream, which is there in every unit but the embedding."""
    assert x_ND is not None, "a stage that is not the first needs its input"
    return x_ND


def linear(inner: int, out: int, bias: bool) -> nn.Linear:
    """Return a linear layer whose values are set later (see `models/initial.py`)."""
    # `skip_init` would make real memory on the meta device too, were it not told.
    device = torch.get_default_device()
    return cast(nn.Linear, nn.utils.skip_init(nn.Linear, inner, out, bias=bias, device=device))
