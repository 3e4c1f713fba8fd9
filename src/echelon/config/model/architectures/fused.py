# SPDX-License-Identifier: Apache-2.0
"""Models whose files put matrices together: Phi-3 and Phi-4, GLM 4."""

from __future__ import annotations

from echelon.config.model.architectures.common import (
    HEAD_DIM,
    read_decoder,
    read_window,
    write_decoder,
)
from echelon.config.model.architectures.record import Architecture, Keys
from echelon.config.model.config_json import ConfigJsonReader
from echelon.core.model_shape import ModelShape

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
        tensors=(
            "model.embed_tokens.weight",
            "model.layers.0.self_attn.qkv_proj.weight",
            _GATE_UP,
        ),
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
        tensors=(
            "model.embed_tokens.weight",
            _GATE_UP,
            "model.layers.0.post_mlp_layernorm.weight",
        ),
    ),
}
"""Each by its model_type."""
