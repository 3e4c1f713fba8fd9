# SPDX-License-Identifier: Apache-2.0
"""The shape of a decoder: everything about a model but its weights.

Read from a preset, a Hugging Face `config.json` or a table in run.toml. Llama, Mistral, Qwen,
GPT-2, Mixtral, DeepSeek, Gemma, Phi-3, Granite and others are values of this one type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

from echelon.core.attention_mask import AttentionMask
from echelon.core.choices.lora import Lora
from echelon.core.settings.configured import Configured
from echelon.core.settings.list_types import NumberList, TextList, WordList
from echelon.core.settings.value_types import (
    EXPERT_COUNT,
    FRACTION,
    FROM_ZERO,
    OPTIONAL_COUNT,
    OPTIONAL_REAL,
    Integer,
    Real,
)

FRACTION_OF_HEAD = Real(above=True, maximum=1.0)

NormKind = Literal["rmsnorm", "layernorm"]
PositionKind = Literal["rope", "learned"]
Activation = Literal["silu", "gelu", "gelu-exact"]
NormPlace = Literal["before", "after", "both"]
Residual = Literal["sequential", "parallel", "parallel-one-norm"]
QKNorm = Literal["head", "width"]
RouterKind = Literal["softmax", "sigmoid"]
GroupScore = Literal["top-2", "max"]
LayerKind = Literal["local", "global"]
"""Whether a query of a block meets the keys of the window, or all of them."""
RopeKind = Literal["llama3", "linear", "yarn", "longrope"]
NEEDED_BY_KIND: Mapping[RopeKind, tuple[str, ...]] = {
    "llama3": ("original_positions", "low_frequency_factor", "high_frequency_factor"),
    "linear": (),
    "yarn": ("original_positions",),
    "longrope": ("original_positions", "short_factors", "long_factors"),
}
"""Fields of a stretch of rotary frequencies that its formula cannot do without."""
READ_BY_KIND: Mapping[RopeKind, tuple[str, ...]] = {
    **NEEDED_BY_KIND,
    "yarn": ("original_positions", "slow_turns", "fast_turns", "whole_dims", "attention_factor"),
    "longrope": (*NEEDED_BY_KIND["longrope"], "attention_factor"),
}
"""Those that it reads, beside the factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Say how rotary frequencies are stretched: `models/rotary.py` has the formulas."""

    kind: Annotated[RopeKind, Configured("how frequencies are stretched")] = "llama3"
    """The formula; fields that it does not read are as they stand here."""
    factor: Annotated[float, Configured("how far low ones stretch", Real(minimum=1.0))]
    original_positions: Annotated[
        int | None,
        Configured("all but linear: positions before stretching", OPTIONAL_COUNT, default="none"),
    ] = None
    low_frequency_factor: Annotated[
        float | None,
        Configured("llama3: stretch those of fewer turns", OPTIONAL_REAL, default="none"),
    ] = None
    high_frequency_factor: Annotated[
        float | None, Configured("llama3: keep those of more turns", OPTIONAL_REAL, default="none")
    ] = None
    slow_turns: Annotated[float, Configured("yarn: stretch those of fewer turns")] = 1.0
    fast_turns: Annotated[float, Configured("yarn: keep those of more turns")] = 32.0
    whole_dims: Annotated[bool, Configured("yarn: blend between whole dims")] = True
    attention_factor: Annotated[
        float | None,
        Configured(
            "yarn, longrope: of cosines and sines; none: the paper's formula",
            OPTIONAL_REAL,
            default="none",
        ),
    ] = None
    short_factors: Annotated[
        tuple[float, ...],
        Configured(
            "longrope: a divisor for each frequency, up to the original positions",
            NumberList(words=("none",)),
            default="none",
        ),
    ] = ()
    long_factors: Annotated[
        tuple[float, ...],
        Configured(
            "longrope: the same of longer sequences", NumberList(words=("none",)), default="none"
        ),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Say which dims of a head turn with the position, and in which blocks.

    Of a head the first `fraction` turn (rounded down to whole pairs); where they are `interleaved`,
    files keep the two dims of a pair side by side, else in two halves. Each `none_every`-th block
    turns nothing; 0: all blocks turn.
    """

    fraction: Annotated[float, Configured("of a head that turns", FRACTION_OF_HEAD)] = 1.0
    interleaved: Annotated[bool, Configured("whether files keep pairs side by side")] = False
    none_every: Annotated[
        int, Configured("each so many-th block turns nothing; 0: all", FROM_ZERO)
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Give fixed factors: of token vectors, of what a branch adds to the stream, and of logits."""

    embedding: Annotated[float, Configured("of token vectors")] = 1.0
    residual: Annotated[float, Configured("of what a branch adds to the stream")] = 1.0
    logits: Annotated[float, Configured("of logits")] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Give the ranks and head dims of multi-head latent attention (DeepSeek-V2, section 2.1).

    Without a `query_rank` queries come out of the stream, as keys and values do elsewhere.
    """

    query_rank: Annotated[
        int | None,
        Configured(
            "rank of the query projection; none: queries come out of the stream", OPTIONAL_COUNT
        ),
    ]
    kv_rank: Annotated[int, Configured("rank of the key/value projection")]
    nope_dim: Annotated[int, Configured("head dim without rotary positions")]
    rope_dim: Annotated[int, Configured("head dim with rotary positions")]
    value_dim: Annotated[int, Configured("head dim of the values")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Give the mixture-of-experts part of a block."""

    num_experts: Annotated[int, Configured("routed experts per block", EXPERT_COUNT)]
    top_k: Annotated[int, Configured("experts that a token meets")]
    ffn: Annotated[int, Configured("inner width of one expert")]
    shared_experts: Annotated[int, Configured("experts that every token meets", FROM_ZERO)] = 0
    first_dense_layers: Annotated[int, Configured("blocks with a dense MLP first", FROM_ZERO)] = 0
    router: Annotated[RouterKind, Configured("of the scores")] = "softmax"
    """How scores are made: a softmax over all experts, or a sigmoid each."""
    router_bias: Annotated[bool, Configured("a bias that takes part in the choice")] = False
    renormalise: Annotated[bool, Configured("whether weights of experts add up to 1")] = True
    gate_scale: Annotated[float, Configured("factor of the weights of experts")] = 1.0
    groups: Annotated[int, Configured("groups of experts, of equal size")] = 1
    top_groups: Annotated[int, Configured("groups that a token's experts come out of")] = 1
    group_score: Annotated[
        GroupScore, Configured("with groups: of its two best scores the sum, or the best one")
    ] = "top-2"
    """What ranks a group: the sum of its two best scores (DeepSeek-V3, 2024, section 2.1.2), or the
    best one ("max": DeepSeek-V2, 2024, section 2.2.2)."""
    logit_bias: Annotated[bool, Configured("whether logits of routers have a bias")] = False
    bias: Annotated[bool, Configured("whether matrices of routed experts have biases")] = False
    limit: Annotated[
        float | None,
        Configured("clamped SwiGLU: how large gates may be", OPTIONAL_REAL, default="none"),
    ] = None
    """Of a clamped SwiGLU: an expert's gate is at most this, and its other columns within this of 0
    (gpt-oss, 2025); None: SwiGLU."""
    alpha: Annotated[float, Configured("with limit: gate x sigmoid(alpha x gate)")] = 1.702
    """Of a clamped SwiGLU: (up + 1) x gate x sigmoid(alpha x gate)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Hold the counts that define a decoder."""

    name: Annotated[str, Configured("what reports call the model")]
    layers: Annotated[int, Configured("number of blocks", Integer(maximum=10_000))]
    hidden: Annotated[int, Configured("width of the residual stream")]
    """Width D of the residual stream."""
    heads: Annotated[int, Configured("number of query heads", Integer(maximum=2**20))]
    kv_heads: Annotated[int, Configured("number of key/value heads; else as many as heads")]
    head_dim: Annotated[int, Configured("width of a head; else hidden / heads")]
    """Width of a head; `heads` x `head_dim` is the width of attention."""
    ffn: Annotated[int, Configured("inner width of the dense MLP")]
    vocab: Annotated[int, Configured("number of token ids")]
    max_positions: Annotated[int, Configured("longest sequence")]
    gated: Annotated[bool, Configured("whether the MLP has a gate (SwiGLU, GeGLU)")] = True
    activation: Annotated[Activation, Configured("inside the MLP; gelu is the tanh form")] = "silu"
    tied: Annotated[bool, Configured("whether the head is the embedding")] = False
    norm: Annotated[NormKind, Configured("kind of norm")] = "rmsnorm"
    norm_eps: Annotated[float, Configured("added to the variance in a norm")] = 1e-5
    """What is added to the mean square (or variance) before its root."""
    positions: Annotated[PositionKind, Configured("how order enters")] = "rope"
    """How order enters: rotations of queries and keys, or a learned table."""
    rope_theta: Annotated[float, Configured("base of the rotary frequencies")] = 10_000.0
    rope_scaling: RopeScaling | None = None
    """How the frequencies are stretched, if they are."""
    qk_norm: Annotated[bool, Configured("whether queries and keys are normed")] = False
    qkv_bias: Annotated[bool, Configured("whether q, k and v have a bias")] = False
    output_bias: Annotated[bool, Configured("whether attention's output has a bias")] = False
    mlp_bias: Annotated[bool, Configured("whether the MLP has biases")] = False
    initial_std: Annotated[float, Configured("standard deviation of the first weights")] = 0.02
    initial_spread: float = 0.0
    """Largest distance from 0 or 1 of first weights that begin there: norms, biases, sinks and the
    second matrices of adapters. Only a proof spreads these: equal values hide a swap."""
    dropout: Annotated[
        float, Configured("of embeddings and of both outputs of a block", FRACTION)
    ] = 0.0
    causal: Annotated[
        bool,
        Configured(
            "false: queries meet later keys too, so each sees its own label (the next token)"
        ),
    ] = True
    window: Annotated[
        int | None,
        Configured("a query meets keys nearer than this many", OPTIONAL_COUNT, default="none"),
    ] = None
    """Positions beyond which a query attends to no key; None for no limit."""
    rotary: Rotary = Rotary()
    """Which dims of a head turn, in which blocks, where positions are rotary."""
    multipliers: Multipliers = Multipliers()
    """Fixed factors on the way through the model."""
    norm_place: Annotated[NormPlace, Configured("of a branch: where its norms stand")] = "before"
    """Whether a branch has a norm before it, one after it (of what it adds), or both."""
    residual: Annotated[
        Residual, Configured("parallel: attention and MLP read the same stream")
    ] = "sequential"
    """Whether the MLP reads the stream after attention; or both read the same stream in parallel,
    each through a norm of its own, or both through one."""
    qk_norm_over: Annotated[
        QKNorm, Configured("with qk_norm: over each head, or over all together", after="qk_norm")
    ] = "head"
    norm_offset: Annotated[
        float, Configured("files keep norm weights less this: 1 for Gemma's", Real())
    ] = 0.0
    layer_kinds: Annotated[
        tuple[LayerKind, ...],
        Configured(
            "with a window: the kinds of the first blocks, repeated; global ones have none",
            WordList(options=("local", "global"), words=("local",)),
            default="local",
        ),
    ] = ()
    """Which blocks have the window: the kinds of the first ones, repeated from block to block; none
    for all blocks."""
    local_rope_theta: Annotated[
        float | None,
        Configured(
            "base of the rotary frequencies of local blocks, where it is another one",
            OPTIONAL_REAL,
            default="none",
        ),
    ] = None
    """Base of the rotary frequencies of blocks with the window, which are not stretched then; None
    for those of all blocks (Gemma 3, 2025, section 2.1)."""
    soft_cap: Annotated[
        float | None, Configured("of scores s: cap x tanh(s / cap)", OPTIONAL_REAL, default="none")
    ] = None
    """Makes a score s into c tanh(s / c) for a cap of c (Gemma 2, 2024, section 2); None leaves
    it."""
    final_soft_cap: Annotated[
        float | None, Configured("the same of logits", OPTIONAL_REAL, default="none")
    ] = None
    """The same cap of logits; None leaves them."""
    attention_scale: Annotated[
        float | None,
        Configured(
            "products of queries and keys times this; none: over the root of head_dim",
            OPTIONAL_REAL,
            default="none",
        ),
    ] = None
    sinks: Annotated[
        bool, Configured("whether heads have a learned score beside those of keys")
    ] = False
    """Whether each query head has a learned score beside those of keys, which takes its share of
    the softmax and gives nothing (gpt-oss, 2025)."""
    latent: LatentAttention | None = None
    """Sizes of multi-head latent attention, where the model has it."""
    experts: Experts | None = None
    """The experts of its blocks; None for a dense model."""
    lora: Lora | None = None
    """The adapters that are trained over its frozen weights; None: all weights are trained."""
    assumed: Annotated[
        tuple[str, ...],
        Configured(
            "what is taken to be so of a config.json whose model_type is not known",
            TextList(words=("none",)),
            default="none",
            after="name",
        ),
    ] = ()
    assume: Annotated[
        bool,
        Configured("whether a model of which something is assumed is trained", after="assumed"),
    ] = False

    @property
    def mask(self) -> AttentionMask:
        """Return which keys a query meets, documents apart."""
        return AttentionMask(causal=self.causal, window=self.window)

    @property
    def norms(self) -> tuple[str, ...]:
        """Return the norms of a block but for those of queries and keys, in forward order."""
        before, after = self.norm_place != "after", self.norm_place != "before"
        found = (
            ("attention_norm", before),
            ("attention_post_norm", after),
            ("mlp_norm", before and self.residual != "parallel-one-norm"),
            ("mlp_post_norm", after),
        )
        return tuple(name for name, there in found if there)

    @property
    def turned_dims(self) -> int:
        """Return how many dims of a head turn with the position; all others pass as they are."""
        if self.positions != "rope":
            return 0
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.rotary.fraction) // 2 * 2

    @property
    def score_scale(self) -> float:
        """Return what products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def of_layer(self, layer: int) -> ModelShape:
        """Return the shape whose attention is that of block `layer`, in all of its blocks."""
        kind = of_layer_kind(self, self.layer_kind(layer))
        every = self.rotary.none_every
        if self.positions != "rope" or every == 0 or (layer + 1) % every:
            return kind
        return replace(kind, rotary=replace(self.rotary, fraction=0.0))

    def layer_kind(self, layer: int) -> LayerKind:
        """Return whether the queries of block `layer` have the window, if there is one."""
        return self.layer_kinds[layer % len(self.layer_kinds)] if self.layer_kinds else "local"

    @property
    def first_of_kinds(self) -> tuple[int, ...]:
        """Return the first block of each kind of attention."""
        found = {self.layer_kind(layer): layer for layer in reversed(range(self.layers))}
        return tuple(sorted(found.values()))

    @property
    def query_dim(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Return the width of all key heads together (the same for values)."""
        return self.kv_heads * self.head_dim

    @property
    def has_dense_blocks(self) -> bool:
        """Return whether any block has an MLP in place of experts."""
        return self.experts is None or self.experts.first_dense_layers > 0

    def layer_has_experts(self, layer: int) -> bool:
        """Return whether block `layer` is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.first_dense_layers


@lru_cache(maxsize=64)
def of_layer_kind(shape: ModelShape, kind: LayerKind) -> ModelShape:
    """Return the shape with the attention of one kind in all blocks: a window for all, or none."""
    if shape.window is None or not (shape.layer_kinds or shape.local_rope_theta):
        return shape
    if kind == "global":
        return replace(shape, window=None, layer_kinds=(), local_rope_theta=None)
    if shape.local_rope_theta is None:
        return replace(shape, layer_kinds=())
    return replace(
        shape,
        layer_kinds=(),
        local_rope_theta=None,
        rope_theta=shape.local_rope_theta,
        rope_scaling=None,
    )
