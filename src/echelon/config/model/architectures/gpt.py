# SPDX-License-Identifier: Apache-2.0
"""GPT-2 and its kin, and models whose files put matrices together: Phi-3 and Phi-4, GLM 4."""

from __future__ import annotations

from echelon.config.model.architectures.common import (
    ACTIVATION_NAMES,
    HEAD_DIM,
    Architecture,
    ConfigJsonReader,
    Keys,
    read_activation,
    read_counts,
    read_decoder,
    read_rope,
    read_window,
    write_counts,
    write_decoder,
    write_rope,
)
from echelon.core.model_shape import ModelShape

BIASES = ("qkv_bias", "output_bias", "mlp_bias")


def _read_gpt2(reader: ConfigJsonReader) -> None:
    reader.need(
        layers="n_layer",
        hidden="n_embd",
        heads="n_head",
        vocab="vocab_size",
        max_positions="n_positions",
    )
    hidden = reader.config.get("n_embd")
    reader.take(
        ffn=("n_inner", 4 * hidden if isinstance(hidden, int) else None),
        norm_eps=("layer_norm_epsilon", 1e-5),
        initial_std=("initializer_range", 0.02),
        tied=("tie_word_embeddings", True),
    )
    reader.only(
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    values = {"norm": "layernorm", "positions": "learned", "gated": False, "activation": "gelu"}
    for name, value in {**values, "qkv_bias": True, "output_bias": True, "mlp_bias": True}.items():
        reader.set(name, value, "model_type")


def _write_gpt2(shape: ModelShape) -> Keys:
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": shape.dropout,
        "initializer_range": shape.initial_std,
        "layer_norm_epsilon": shape.norm_eps,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_layer": shape.layers,
        "n_positions": shape.max_positions,
        "resid_pdrop": shape.dropout,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
    }


def _read_starcoder2(reader: ConfigJsonReader) -> None:
    read_counts(reader)
    reader.take(
        norm_eps=("norm_epsilon", 1e-5),
        initial_std=("initializer_range", 0.018042),
        tied=("tie_word_embeddings", True),
        **dict.fromkeys(BIASES, ("use_bias", True)),
    )
    read_activation(reader, "hidden_act", "gelu_pytorch_tanh")
    read_rope(reader, 10_000.0)
    read_window(reader, None)
    reader.set("norm", "layernorm", "model_type")
    reader.set("gated", False, "model_type")


def _write_starcoder2(shape: ModelShape) -> Keys:
    return {
        **write_counts(shape),
        **write_rope(shape),
        "hidden_act": ACTIVATION_NAMES[shape.activation],
        "norm_epsilon": shape.norm_eps,
        "sliding_window": shape.window,
        "use_bias": shape.qkv_bias,
    }


NEOX_PART = 0.25
"""The part of a head that turns where a config.json of GPT-NeoX does not say."""


def _read_gpt_neox(reader: ConfigJsonReader) -> None:
    read_counts(reader)
    reader.take(
        norm_eps=("layer_norm_eps", 1e-5),
        kv_heads=("num_attention_heads", None),
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
    )
    read_activation(reader, "hidden_act", "gelu")
    theta, part = (reader.config.get(key) for key in ("rotary_emb_base", "rotary_pct"))
    read_rope(
        reader,
        theta if isinstance(theta, int | float) else 10_000.0,
        part if isinstance(part, int | float) else NEOX_PART,
    )
    parallel = reader.config.get("use_parallel_residual", True)
    values = {"norm": "layernorm", "gated": False, "mlp_bias": True}
    for name, value in values.items():
        reader.set(name, value, "model_type")
    reader.set("residual", "parallel" if parallel else "sequential", "use_parallel_residual")


def _write_gpt_neox(shape: ModelShape) -> Keys:
    counts = write_counts(shape)
    return {
        **{key: value for key, value in counts.items() if key != "num_key_value_heads"},
        **write_rope(shape),
        "attention_bias": shape.qkv_bias,
        "hidden_act": ACTIVATION_NAMES[shape.activation],
        "layer_norm_eps": shape.norm_eps,
        "partial_rotary_factor": shape.rotary.fraction,
        "rotary_emb_base": shape.rope_theta,
        "rotary_pct": shape.rotary.fraction,
        "use_parallel_residual": shape.residual == "parallel",
    }


def _read_falcon(reader: ConfigJsonReader) -> None:
    config = reader.config
    reader.need(
        layers="num_hidden_layers",
        hidden="hidden_size",
        heads="num_attention_heads",
        vocab="vocab_size",
    )
    hidden, new = config.get("hidden_size"), config.get("new_decoder_architecture") is True
    heads = config.get("num_attention_heads")
    # The older ones have one key head, or as many as queries.
    of_older = 1 if config.get("multi_query", True) else heads
    kv_heads = config.get("num_kv_heads") or heads
    reader.set("kv_heads", kv_heads if new else of_older, "num_kv_heads")
    reader.take(
        ffn=("ffn_hidden_size", 4 * hidden if isinstance(hidden, int) else None),
        norm_eps=("layer_norm_epsilon", 1e-5),
        initial_std=("initializer_range", 0.02),
        tied=("tie_word_embeddings", True),
        max_positions=("max_position_embeddings", 2048),
        **dict.fromkeys(BIASES, ("bias", False)),
    )
    read_activation(reader, "activation", "gelu")
    read_rope(reader, 10_000.0)
    reader.only(alibi=(False, None))
    two = config.get("num_ln_in_parallel_attn")
    two = (2 if new else 1) if two is None else two
    parallel = new or config.get("parallel_attn", True)
    if not new and two == 2:
        reader.refuse("num_ln_in_parallel_attn", two, 1, None)
    kind = ("parallel" if two == 2 else "parallel-one-norm") if parallel else "sequential"
    reader.set("residual", kind, "parallel_attn")
    reader.set("norm", "layernorm", "model_type")
    reader.set("gated", False, "model_type")


def _write_falcon(shape: ModelShape) -> Keys:
    older = shape.residual == "sequential" or shape.kv_heads == 1
    return {
        "activation": ACTIVATION_NAMES[shape.activation],
        "alibi": False,
        "bias": shape.qkv_bias,
        "ffn_hidden_size": shape.ffn,
        "hidden_size": shape.hidden,
        "initializer_range": shape.initial_std,
        "layer_norm_epsilon": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "multi_query": shape.kv_heads == 1,
        "new_decoder_architecture": not older or shape.residual == "parallel",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_kv_heads": shape.kv_heads,
        "num_ln_in_parallel_attn": 2 if shape.residual == "parallel" else 1,
        "parallel_attn": shape.residual != "sequential",
        **write_rope(shape),
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
    }


GPT_LIKE = {
    "gpt2": Architecture(
        models="GPT-2",
        name="GPT2LMHeadModel",
        read=_read_gpt2,
        keys=_write_gpt2,
        taken="a table of positions, layer norms, biases",
        tensors=("transformer.wte.weight",),
    ),
    "starcoder2": Architecture(
        models="StarCoder 2",
        name="Starcoder2ForCausalLM",
        read=_read_starcoder2,
        keys=_write_starcoder2,
        taken="layer norms with rotary positions, biases, the window",
        tensors=("model.embed_tokens.weight", "model.layers.0.mlp.c_fc.weight"),
    ),
    "gpt_neox": Architecture(
        models="GPT-NeoX, Pythia",
        name="GPTNeoXForCausalLM",
        read=_read_gpt_neox,
        keys=_write_gpt_neox,
        taken="attention beside the MLP, heads of which a part turns, layer norms, biases",
        tensors=("gpt_neox.embed_in.weight",),
    ),
    "falcon": Architecture(
        models="Falcon",
        name="FalconForCausalLM",
        read=_read_falcon,
        keys=_write_falcon,
        taken="attention beside the MLP through one norm or two, one key head or groups; no alibi",
        tensors=("transformer.word_embeddings.weight",),
    ),
}
"""Each by its model_type."""


GLM_EPS = 1.5625e-7
"""What transformers adds to the mean square where a config.json has no rms_norm_eps."""

GLM_PART = 0.5
"""The part of a head that turns where a config.json has no partial_rotary_factor."""


def _read_phi3(reader: ConfigJsonReader) -> None:
    read_decoder(reader, eps=1e-5)
    reader.take(head_dim=HEAD_DIM)
    read_window(reader, None)


def _write_phi3(shape: ModelShape) -> Keys:
    scaling = shape.rope_scaling
    original = None if scaling is None else scaling.original_positions
    keys: Keys = {
        **write_decoder(shape),
        "original_max_position_embeddings": original or shape.max_positions,
        "partial_rotary_factor": shape.rotary.fraction,
        "sliding_window": shape.window,
    }
    if shape.head_dim * shape.heads != shape.hidden:
        keys["head_dim"] = shape.head_dim
    return keys


def _read_glm(reader: ConfigJsonReader) -> None:
    read_decoder(reader, part=GLM_PART, eps=GLM_EPS)
    reader.take(head_dim=("head_dim", 128), qkv_bias=("attention_bias", True))
    reader.set("rotary.interleaved", True, "model_type")


def _write_glm(shape: ModelShape) -> Keys:
    return {
        **write_decoder(shape),
        "attention_bias": shape.qkv_bias,
        "head_dim": shape.head_dim,
        "partial_rotary_factor": shape.rotary.fraction,
    }


def _read_glm4(reader: ConfigJsonReader) -> None:
    _read_glm(reader)
    reader.set("norm_place", "both", "model_type")


_GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"

FUSED = {
    "phi3": Architecture(
        models="Phi-3, Phi-4",
        name="Phi3ForCausalLM",
        read=_read_phi3,
        keys=_write_phi3,
        taken="heads of which a part turns, the window, longrope",
        tensors=("model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", _GATE_UP),
    ),
    "glm": Architecture(
        models="GLM 4 (9B, 2024)",
        name="GlmForCausalLM",
        read=_read_glm,
        keys=_write_glm,
        taken="heads of which a part turns, pair by pair; biases of q, k and v",
        tensors=("model.embed_tokens.weight", _GATE_UP),
    ),
    "glm4": Architecture(
        models="GLM 4 (2025)",
        name="Glm4ForCausalLM",
        read=_read_glm4,
        keys=_write_glm,
        taken="heads of which a part turns, pair by pair; norms before and after branches",
        tensors=("model.embed_tokens.weight", _GATE_UP, "model.layers.0.post_mlp_layernorm.weight"),
    ),
}
"""Each by its model_type."""
