"""Llama as one writes it in plain PyTorch: what a framework must not be slower than.

Shape suffixes: B sequences, T positions, D hidden, V vocabulary, H heads, E head width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.core.model_shape import ModelShape


class _Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, query, kv = shape.hidden, shape.query_dim, shape.kv_dim
        self.attention_norm = nn.RMSNorm(hidden, eps=shape.norm_eps)
        self.qkv = nn.Linear(hidden, query + 2 * kv, bias=False)
        self.o = nn.Linear(query, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=shape.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, hidden, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(fn.silu(gate) * up)

    def _attend(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        qkv = self.qkv(x_BTD).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        out = fn.scaled_dot_product_attention(
            _turned(q, cos, sin),
            _turned(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=shape.kv_heads < shape.heads,
        )
        return self.o(out.transpose(1, 2).flatten(2))


class PlainLlama(nn.Module):
    """The decoder with its loss: forward gives the mean cross-entropy."""

    def __init__(self, shape: ModelShape, length: int) -> None:
        """Make the weights of `shape`, and rotary tables for `length` positions."""
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angle_TE = torch.outer(torch.arange(length).float(), shape.rope_theta**-half)
        self.register_buffer("cos", angle_TE.cos(), persistent=False)
        self.register_buffer("sin", angle_TE.sin(), persistent=False)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos, self.sin)
        return mean_loss(self.head(self.norm(x_BTD)), labels_BT)


class HuggingFaceLoss(nn.Module):
    """The Llama of transformers with the same loss."""

    def __init__(self, model: nn.Module) -> None:
        """Hold a `LlamaForCausalLM`."""
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return mean_loss(self.model(input_ids=tokens_BT).logits, labels_BT)


def mean_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, computed in fp32."""
    return fn.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return out.to(x.dtype)
