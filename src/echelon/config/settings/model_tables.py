# SPDX-License-Identifier: Apache-2.0
"""The tables and keys of a model, and of experts, in run.toml.

`config/settings/schema.py` lists all settings.
"""

from __future__ import annotations

from echelon.config.settings.list_types import ChoiceList, NumberList, TextList, WordList
from echelon.config.settings.value_types import (
    COUNT,
    DEGREE,
    EXPERT_COUNT,
    FRACTION,
    FROM_ZERO,
    OPTIONAL_COUNT,
    OPTIONAL_REAL,
    POSITIVE,
    Choice,
    Flag,
    Integer,
    Real,
    Text,
    setting,
)
from echelon.core.choices.lora import ALL_LINEAR, LORA_LINEARS

FRACTION_OF_HEAD = Real(above=True, maximum=1.0)

MODEL_EXPERTS = (
    setting("model.experts.num_experts", EXPERT_COUNT, None, "routed experts per block"),
    setting("model.experts.top_k", COUNT, None, "experts that a token meets"),
    setting("model.experts.ffn", COUNT, None, "inner width of one expert"),
    setting("model.experts.shared_experts", FROM_ZERO, 0, "experts that every token meets"),
    setting("model.experts.first_dense_layers", FROM_ZERO, 0, "blocks with a dense MLP first"),
    setting(
        "model.experts.router", Choice(options=("softmax", "sigmoid")), "softmax", "of the scores"
    ),
    setting("model.experts.router_bias", Flag(), False, "a bias that takes part in the choice"),
    setting("model.experts.renormalise", Flag(), True, "whether weights of experts add up to 1"),
    setting("model.experts.gate_scale", POSITIVE, 1.0, "factor of the weights of experts"),
    setting("model.experts.groups", COUNT, 1, "groups of experts, of equal size"),
    setting("model.experts.top_groups", COUNT, 1, "groups that a token's experts come out of"),
    setting(
        "model.experts.group_score",
        Choice(options=("top-2", "max")),
        "top-2",
        "with groups: of its two best scores the sum, or the best one",
    ),
    setting("model.experts.logit_bias", Flag(), False, "whether logits of routers have a bias"),
    setting("model.experts.bias", Flag(), False, "whether matrices of routed experts have biases"),
    setting("model.experts.limit", OPTIONAL_REAL, "none", "clamped SwiGLU: how large gates may be"),
    setting("model.experts.alpha", POSITIVE, 1.702, "with limit: gate x sigmoid(alpha x gate)"),
)

EXPERTS = (
    setting(
        "experts.balance",
        Choice(options=("none", "aux", "bias", "both")),
        "none",
        "what keeps loads even: a loss, a bias of the choice, or both",
    ),
    setting("experts.aux_coefficient", POSITIVE, 0.01, "with aux: of the loss for even loads"),
    setting(
        "experts.aux_over",
        Choice(options=("global", "sequence", "microbatch")),
        "global",
        "with aux: over which tokens loads are to be even",
    ),
    setting("experts.bias_rate", POSITIVE, 0.001, "with bias: how far it moves after a step"),
    setting("experts.z_coefficient", Real(), 0.0, "of the loss for small router logits"),
    setting(
        "experts.capacity_factor",
        Real(above=True, words=("dropless",)),
        "dropless",
        "room of an expert in each sequence: times its even share",
    ),
    setting(
        "experts.drop",
        Choice(options=("position", "score")),
        "position",
        "with a capacity: what is dropped, later tokens or lower scores",
    ),
    setting(
        "experts.route",
        Choice(options=("scores", "even", "one", "not-last")),
        "scores",
        "for benchmarks and proofs: where tokens go whatever their scores",
    ),
    setting("experts.expert_tp", DEGREE, 1, "pieces of one expert: 1, or as many as tp"),
    setting(
        "experts.zero_stage",
        Integer(minimum=0, maximum=3, words=("auto",)),
        "auto",
        "what ranks with the same experts share out; auto: zero.stage",
    ),
    setting(
        "experts.dispatch",
        Choice(options=("flat", "two-hop")),
        "flat",
        "two-hop: a token crosses to a node once",
    ),
    setting("experts.chunks", COUNT, 1, "parts of a microbatch that travel one by one"),
    setting("experts.padded", Flag(), False, "with a capacity: sizes do not depend on the routing"),
)


MODEL = (
    setting("model.preset", Text(), None, "a model by name: echelon config presets"),
    setting("model.hf_config", Text(), None, "a Hugging Face config.json", path=True),
    setting("model.name", Text(), None, "what reports call the model"),
    setting(
        "model.assumed",
        TextList(words=("none",)),
        "none",
        "what is taken to be so of a config.json whose model_type is not known",
    ),
    setting(
        "model.assume", Flag(), False, "whether a model of which something is assumed is trained"
    ),
    setting("model.layers", Integer(maximum=10_000), None, "number of blocks"),
    setting("model.hidden", COUNT, None, "width of the residual stream"),
    setting("model.heads", Integer(maximum=2**20), None, "number of query heads"),
    setting("model.kv_heads", COUNT, None, "number of key/value heads; else as many as heads"),
    setting("model.head_dim", COUNT, None, "width of a head; else hidden / heads"),
    setting("model.ffn", COUNT, None, "inner width of the dense MLP"),
    setting("model.vocab", COUNT, None, "number of token ids"),
    setting("model.max_positions", COUNT, None, "longest sequence"),
    setting("model.gated", Flag(), True, "whether the MLP has a gate (SwiGLU, GeGLU)"),
    setting(
        "model.activation",
        Choice(options=("silu", "gelu", "gelu-exact")),
        "silu",
        "inside the MLP; gelu is the tanh form",
    ),
    setting("model.tied", Flag(), False, "whether the head is the embedding"),
    setting("model.norm", Choice(options=("rmsnorm", "layernorm")), "rmsnorm", "kind of norm"),
    setting("model.norm_eps", POSITIVE, 1e-5, "added to the variance in a norm"),
    setting("model.positions", Choice(options=("rope", "learned")), "rope", "how order enters"),
    setting("model.rope_theta", POSITIVE, 10_000.0, "base of the rotary frequencies"),
    setting("model.qk_norm", Flag(), False, "whether queries and keys are normed"),
    setting(
        "model.qk_norm_over",
        Choice(options=("head", "width")),
        "head",
        "with qk_norm: over each head, or over all together",
    ),
    setting("model.qkv_bias", Flag(), False, "whether q, k and v have a bias"),
    setting("model.output_bias", Flag(), False, "whether attention's output has a bias"),
    setting("model.mlp_bias", Flag(), False, "whether the MLP has biases"),
    setting("model.initial_std", POSITIVE, 0.02, "standard deviation of the first weights"),
    setting("model.dropout", FRACTION, 0.0, "of embeddings and of both outputs of a block"),
    setting(
        "model.causal",
        Flag(),
        True,
        "false: queries meet later keys too, so each sees its own label (the next token)",
    ),
    setting("model.window", OPTIONAL_COUNT, "none", "a query meets keys nearer than this many"),
    setting(
        "model.norm_place",
        Choice(options=("before", "after", "both")),
        "before",
        "of a branch: where its norms stand",
    ),
    setting(
        "model.residual",
        Choice(options=("sequential", "parallel", "parallel-one-norm")),
        "sequential",
        "parallel: attention and MLP read the same stream",
    ),
    setting("model.norm_offset", Real(), 0.0, "files keep norm weights less this: 1 for Gemma's"),
    setting(
        "model.layer_kinds",
        WordList(options=("local", "global"), words=("local",)),
        "local",
        "with a window: the kinds of the first blocks, repeated; global ones have none",
    ),
    setting(
        "model.local_rope_theta",
        OPTIONAL_REAL,
        "none",
        "base of the rotary frequencies of local blocks, where it is another one",
    ),
    setting("model.soft_cap", OPTIONAL_REAL, "none", "of scores s: cap x tanh(s / cap)"),
    setting("model.final_soft_cap", OPTIONAL_REAL, "none", "the same of logits"),
    setting(
        "model.attention_scale",
        OPTIONAL_REAL,
        "none",
        "products of queries and keys times this; none: over the root of head_dim",
    ),
    setting(
        "model.sinks", Flag(), False, "whether heads have a learned score beside those of keys"
    ),
)

ROPE_SCALING = (
    setting(
        "model.rope_scaling.kind",
        Choice(options=("llama3", "linear", "yarn", "longrope")),
        "llama3",
        "how frequencies are stretched",
    ),
    setting("model.rope_scaling.factor", Real(minimum=1.0), None, "how far low ones stretch"),
    setting(
        "model.rope_scaling.original_positions",
        OPTIONAL_COUNT,
        "none",
        "all but linear: positions before stretching",
    ),
    setting(
        "model.rope_scaling.low_frequency_factor",
        OPTIONAL_REAL,
        "none",
        "llama3: stretch those of fewer turns",
    ),
    setting(
        "model.rope_scaling.high_frequency_factor",
        OPTIONAL_REAL,
        "none",
        "llama3: keep those of more turns",
    ),
    setting("model.rope_scaling.slow_turns", POSITIVE, 1.0, "yarn: stretch those of fewer turns"),
    setting("model.rope_scaling.fast_turns", POSITIVE, 32.0, "yarn: keep those of more turns"),
    setting("model.rope_scaling.whole_dims", Flag(), True, "yarn: blend between whole dims"),
    setting(
        "model.rope_scaling.attention_factor",
        OPTIONAL_REAL,
        "none",
        "yarn, longrope: of cosines and sines; none: the paper's formula",
    ),
    setting(
        "model.rope_scaling.short_factors",
        NumberList(words=("none",)),
        "none",
        "longrope: a divisor for each frequency, up to the original positions",
    ),
    setting(
        "model.rope_scaling.long_factors",
        NumberList(words=("none",)),
        "none",
        "longrope: the same of longer sequences",
    ),
)

ROTARY = (
    setting("model.rotary.fraction", FRACTION_OF_HEAD, 1.0, "of a head that turns"),
    setting("model.rotary.interleaved", Flag(), False, "whether files keep pairs side by side"),
    setting("model.rotary.none_every", FROM_ZERO, 0, "each so many-th block turns nothing; 0: all"),
)

MULTIPLIERS = (
    setting("model.multipliers.embedding", POSITIVE, 1.0, "of token vectors"),
    setting("model.multipliers.residual", POSITIVE, 1.0, "of what a branch adds to the stream"),
    setting("model.multipliers.logits", POSITIVE, 1.0, "of logits"),
)

LATENT = (
    setting(
        "model.latent.query_rank",
        OPTIONAL_COUNT,
        None,
        "rank of the query projection; none: queries come out of the stream",
    ),
    setting("model.latent.kv_rank", COUNT, None, "rank of the key/value projection"),
    setting("model.latent.nope_dim", COUNT, None, "head dim without rotary positions"),
    setting("model.latent.rope_dim", COUNT, None, "head dim with rotary positions"),
    setting("model.latent.value_dim", COUNT, None, "head dim of the values"),
)

LORA = (
    setting(
        "lora.rank", OPTIONAL_COUNT, "none", "width of adapters; none: all weights are trained"
    ),
    setting("lora.alpha", POSITIVE, 16.0, "adapters are scaled by alpha / rank"),
    setting(
        "lora.targets",
        ChoiceList(options=LORA_LINEARS, words=(ALL_LINEAR,)),
        ALL_LINEAR,
        "layers with an adapter; all-linear: those of attention and of the MLP",
    ),
    setting("lora.rslora", Flag(), False, "scaled by alpha / sqrt(rank)"),
    setting("lora.dropout", FRACTION, 0.0, "of what an adapter reads; 0 alone is built"),
)

MODEL_TABLES = (*MODEL, *ROTARY, *ROPE_SCALING, *MULTIPLIERS, *LATENT, *MODEL_EXPERTS)
"""Every setting of a model, in the order in which a run file lists them."""
