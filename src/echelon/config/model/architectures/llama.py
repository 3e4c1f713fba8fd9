# SPDX-License-Identifier: Apache-2.0
"""Llama and what differs from it in little: Mistral, Qwen 2 and 3, SmolLM3, Granite, Gemma."""

from __future__ import annotations

from typing import cast

from echelon.config.model.architectures.common import (
    ATTENTION_BIASES,
    FULL,
    HEAD_DIM,
    SLIDING,
    Architecture,
    ConfigJsonReader,
    Keys,
    read_activation,
    read_counts,
    read_decoder,
    read_kinds,
    read_rope,
    read_window,
    write_decoder,
    write_kinds,
)
from echelon.core.model_shape import ModelShape

MISTRAL_WINDOW = QWEN_WINDOW = 4096  # tokens
QWEN_FULL_LAYERS = 28
"""What transformers takes where a config.json has no sliding_window or max_window_layers."""


def _read_llama(reader: ConfigJsonReader) -> None:
    read_decoder(reader)
    reader.take(head_dim=HEAD_DIM, **ATTENTION_BIASES, mlp_bias=("mlp_bias", False))


def _write_llama(shape: ModelShape) -> Keys:
    return {
        **write_decoder(shape),
        "attention_bias": shape.qkv_bias,
        "head_dim": shape.head_dim,
        "mlp_bias": shape.mlp_bias,
    }


def _read_mistral(reader: ConfigJsonReader) -> None:
    read_decoder(reader)
    reader.take(head_dim=HEAD_DIM)
    read_window(reader, MISTRAL_WINDOW)


def _write_mistral(shape: ModelShape) -> Keys:
    return {**write_decoder(shape), "head_dim": shape.head_dim, "sliding_window": shape.window}


def _read_qwen2(reader: ConfigJsonReader) -> None:
    read_decoder(reader)
    reader.set("qkv_bias", True, "model_type")
    _qwen_window(reader)


def _write_qwen2(shape: ModelShape) -> Keys:
    return {**write_decoder(shape), **_write_qwen_window(shape)}


def read_qwen3(reader: ConfigJsonReader) -> None:
    """Read what Qwen3 has, with or without experts."""
    read_decoder(reader)
    reader.set("qk_norm", True, "model_type")
    reader.take(head_dim=("head_dim", 128), **ATTENTION_BIASES)
    _qwen_window(reader)


def write_qwen3(shape: ModelShape) -> Keys:
    """Return what Qwen3 has, with or without experts."""
    return {
        **write_decoder(shape),
        **_write_qwen_window(shape),
        "attention_bias": shape.qkv_bias,
        "head_dim": shape.head_dim,
    }


def _qwen_window(reader: ConfigJsonReader) -> None:
    slides = reader.config.get("use_sliding_window")
    if slides is not None and not isinstance(slides, bool):
        reader.refuse("use_sliding_window", slides, False, True)
    if slides is not True:
        return
    if reader.config["model_type"] == "qwen3_moe":
        _qwen3_moe_window(reader)
        return
    kinds = _layer_kinds(reader)
    if "local" in kinds:
        read_window(reader, QWEN_WINDOW)
        read_kinds(reader, kinds, "layer_types")


def _qwen3_moe_window(reader: ConfigJsonReader) -> None:
    """Read the window of Qwen3-MoE: transformers 4 and 5 differ in which layers of it slide."""
    window = reader.config.get("sliding_window", QWEN_WINDOW)
    longest = reader.config.get("max_position_embeddings")
    if set(_layer_kinds(reader)) == {"local"}:
        read_window(reader, QWEN_WINDOW)
    elif isinstance(window, int) and isinstance(longest, int):
        reader.set("max_positions", min(window, longest), "sliding_window")


def _layer_kinds(reader: ConfigJsonReader) -> list[str]:
    """Return the kinds of all layers: those listed, else full ones before sliding ones."""
    listed, layers = reader.config.get("layer_types"), reader.config.get("num_hidden_layers")
    if isinstance(listed, list):
        return ["local" if one == SLIDING else "global" for one in cast("list[object]", listed)]
    full = reader.config.get("max_window_layers", QWEN_FULL_LAYERS)
    if not isinstance(full, int) or not isinstance(layers, int):
        return ["global"]
    return ["local" if layer >= full else "global" for layer in range(layers)]


def _write_qwen_window(shape: ModelShape) -> Keys:
    if shape.window is None:
        return {"use_sliding_window": False}
    return {
        **write_kinds(shape),
        "max_window_layers": 0,
        "sliding_window": shape.window,
        "use_sliding_window": True,
    }


SMOLLM3_INTERVAL = 4
"""Every so-many-th block of SmolLM3 turns nothing where its config.json does not say which."""


def _read_smollm3(reader: ConfigJsonReader) -> None:
    read_decoder(reader, theta=2e6)
    tied, interval = ("tie_word_embeddings", True), "no_rope_layer_interval"
    reader.take(tied=tied, **ATTENTION_BIASES, mlp_bias=("mlp_bias", False))
    reader.only(use_sliding_window=(False, None))
    every = reader.config.get(interval, SMOLLM3_INTERVAL)
    turns, layers = reader.config.get("no_rope_layers"), reader.config.get("num_hidden_layers")
    if turns is None or not isinstance(layers, int):
        reader.set("rotary.none_every", every, interval)
        return
    # Its list has a 1 for each block that turns: what is written is "no rope", what is meant is the
    # opposite.
    listed: list[object] = []
    if isinstance(turns, list):
        listed = cast("list[object]", turns)
    for one in range(layers + 1):
        if listed[:layers] == _turning_blocks(layers, one):
            reader.set("rotary.none_every", one, "no_rope_layers")
            return
    reader.refuse(
        "no_rope_layers", cast("object", turns), _turning_blocks(layers, SMOLLM3_INTERVAL)
    )


def _turning_blocks(layers: int, none_every: int) -> list[int]:
    """Return 1 for each block whose positions turn, 0 for each `none_every`-th."""
    return [int(not none_every or (layer + 1) % none_every != 0) for layer in range(layers)]


def _write_smollm3(shape: ModelShape) -> Keys:
    return {
        **write_decoder(shape),
        "attention_bias": shape.qkv_bias,
        "layer_types": [FULL] * shape.layers,
        "mlp_bias": shape.mlp_bias,
        "no_rope_layer_interval": shape.rotary.none_every or SMOLLM3_INTERVAL,
        "no_rope_layers": _turning_blocks(shape.layers, shape.rotary.none_every),
        "use_sliding_window": False,
    }


def _read_granite(reader: ConfigJsonReader) -> None:
    read_decoder(reader)
    reader.take(**ATTENTION_BIASES, mlp_bias=("mlp_bias", False))
    reader.take(attention_scale=("attention_multiplier", 1.0))
    names = {"embedding": "embedding_multiplier", "residual": "residual_multiplier"}
    reader.take("multipliers.", **{ours: (key, 1.0) for ours, key in names.items()})
    divisor = reader.config.get("logits_scaling", 1.0)
    if isinstance(divisor, int | float) and divisor > 0:
        reader.set("multipliers.logits", 1.0 / divisor, "logits_scaling")
    else:
        reader.refuse("logits_scaling", divisor, 1.0)


def _write_granite(shape: ModelShape) -> Keys:
    return {
        **write_decoder(shape),
        "attention_bias": shape.qkv_bias,
        "attention_multiplier": shape.score_scale,
        "embedding_multiplier": shape.multipliers.embedding,
        "logits_scaling": 1.0 / shape.multipliers.logits,
        "mlp_bias": shape.mlp_bias,
        "residual_multiplier": shape.multipliers.residual,
    }


def _read_gemma(reader: ConfigJsonReader) -> None:
    read_counts(reader)
    reader.take(
        head_dim=("head_dim", 256),
        norm_eps=("rms_norm_eps", 1e-6),
        tied=("tie_word_embeddings", True),
        **ATTENTION_BIASES,
    )
    # transformers means the tanh form whatever it says, for so the released weights were trained.
    key = "hidden_activation" if reader.config.get("hidden_activation") else "hidden_act"
    if reader.config.get(key) == "gelu":
        reader.set("activation", "gelu", key)
    else:
        read_activation(reader, key, "gelu_pytorch_tanh")
    reader.only(use_bidirectional_attention=(None, False))
    read_rope(reader, 10_000.0)
    reader.set("norm_offset", 1.0, "model_type")
    hidden = reader.config.get("hidden_size")
    if isinstance(hidden, int) and hidden > 0:
        reader.set("multipliers.embedding", hidden**0.5, "hidden_size")


def _write_gemma(shape: ModelShape) -> Keys:
    return {**write_decoder(shape), "attention_bias": shape.qkv_bias, "head_dim": shape.head_dim}


def _read_olmo2(reader: ConfigJsonReader) -> None:
    read_decoder(reader, eps=1e-5)
    reader.take(head_dim=HEAD_DIM, **ATTENTION_BIASES)
    for name, value in {"norm_place": "after", "qk_norm": True, "qk_norm_over": "width"}.items():
        reader.set(name, value, "model_type")


def _write_olmo2(shape: ModelShape) -> Keys:
    return {**write_decoder(shape), "attention_bias": shape.qkv_bias, "head_dim": shape.head_dim}


_MULTIPLIERS = "multipliers of token vectors, branches, scores and logits"

LLAMA_LIKE = {
    "llama": Architecture(
        models="Llama 2, Llama 3",
        name="LlamaForCausalLM",
        read=_read_llama,
        keys=_write_llama,
        taken="biases of attention and of the MLP, stretched frequencies of Llama 3.1",
        whole_heads=True,
    ),
    "mistral": Architecture(
        models="Mistral",
        name="MistralForCausalLM",
        read=_read_mistral,
        keys=_write_mistral,
        taken="the window, heads of any width",
    ),
    "qwen2": Architecture(
        models="Qwen 2, Qwen 2.5",
        name="Qwen2ForCausalLM",
        read=_read_qwen2,
        keys=_write_qwen2,
        taken="biases of q, k and v, a window of all layers",
    ),
    "qwen3": Architecture(
        models="Qwen 3",
        name="Qwen3ForCausalLM",
        read=read_qwen3,
        keys=write_qwen3,
        taken="norms of heads, biases, a window of all layers",
    ),
    "gemma": Architecture(
        models="Gemma 1",
        name="GemmaForCausalLM",
        read=_read_gemma,
        keys=_write_gemma,
        taken="token vectors times sqrt(hidden), GeGLU, norms whose files keep 1 less",
    ),
    "granite": Architecture(
        models="Granite 3",
        name="GraniteForCausalLM",
        read=_read_granite,
        keys=_write_granite,
        taken=f"{_MULTIPLIERS}, biases",
    ),
    "olmo2": Architecture(
        models="OLMo 2",
        name="Olmo2ForCausalLM",
        read=_read_olmo2,
        keys=_write_olmo2,
        taken="norms after branches, norms of q and k over all heads together",
        tensors=("model.embed_tokens.weight", "model.layers.0.post_feedforward_layernorm.weight"),
    ),
    "smollm3": Architecture(
        models="SmolLM 3",
        name="SmolLM3ForCausalLM",
        read=_read_smollm3,
        keys=_write_smollm3,
        taken="each so-many-th block without positions, biases",
    ),
}
"""Each by its model_type."""
