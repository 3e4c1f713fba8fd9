"""Models with layer norms and MLPs without a gate: GPT-2, StarCoder2."""

from __future__ import annotations

from echelon.config.model.architectures.common import (
    ACTIVATION_NAMES,
    read_activation,
    read_counts,
    read_window,
    write_counts,
)
from echelon.config.model.architectures.record import Architecture, Keys
from echelon.config.model.architectures.rotary import read_rope, write_rope
from echelon.config.model.config_json import ConfigJsonReader
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
}
"""Each by its model_type."""
