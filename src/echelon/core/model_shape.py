"""The shape of a decoder: everything about a model but its weights.

Read from a preset, a Hugging Face `config.json` or a table in run.toml. Llama, Mistral, Qwen,
GPT-2, Mixtral and DeepSeek are values of this one type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.core.attention_mask import AttentionMask

NormKind = Literal["rmsnorm", "layernorm"]
PositionKind = Literal["rope", "learned"]
Activation = Literal["silu", "gelu"]
RouterKind = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Stretch rotary frequencies as Llama 3.1 does (Llama 3 paper, section 3.4.2)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Give the ranks and head dims of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Give the mixture-of-experts part of a block.

    A token meets the `top_k` of `num_experts` with the highest scores (softmax over all, or a
    sigmoid each, plus a `router_bias` that takes part in the choice only), and `shared_experts`
    beside them. With `groups`, they are chosen out of the `top_groups` whose two best scores add
    up to most (DeepSeek-V3, 2024, section 2.1.2). Its outputs are weighted by the scores, made to
    add up to 1 (`renormalise`) and times `gate_scale`. The first `first_dense_layers` blocks have
    a dense MLP.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_experts: int = 0
    first_dense_layers: int = 0
    router: RouterKind = "softmax"
    router_bias: bool = False
    renormalise: bool = True
    gate_scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Hold the counts that define a decoder.

    `hidden` is the residual width D, `heads` x `head_dim` the attention width, `ffn` the inner
    width F of a dense MLP, `gated` whether it has a gate (SwiGLU) or not (GELU), `vocab` the
    number of token ids V, `positions` how order enters, `max_positions` the longest sequence. A
    query meets the keys at and before it (`causal`) or all, no farther away than `window`; with a
    `soft_cap` of c its scores s become c tanh(s / c) (Gemma 2, 2024, section 2).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    gated: bool = True
    activation: Activation = "silu"
    tied: bool = False
    norm: NormKind = "rmsnorm"
    norm_eps: float = 1e-5
    positions: PositionKind = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    initial_std: float = 0.02
    dropout: float = 0.0
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def mask(self) -> AttentionMask:
        """Return which keys a query meets, documents apart."""
        return AttentionMask(causal=self.causal, window=self.window)

    @property
    def query_dim(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Return the width of all key heads together (the same for values)."""
        return self.kv_heads * self.head_dim

    def layer_has_experts(self, layer: int) -> bool:
        """Return whether block `layer` is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.first_dense_layers
