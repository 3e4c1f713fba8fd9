# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and the text models of Gemma 3: local and global blocks, norms around branches, caps.

Gemma 2, 2024, section 2; Gemma 3, 2025, section 2.1: local blocks turn with a base of their own,
which nothing stretches.
"""

from __future__ import annotations

from typing import cast

from echelon.config.model.architectures.common import (
    ATTENTION_BIASES,
    SLIDING,
    Architecture,
    ConfigJsonReader,
    Keys,
    read_activation,
    read_counts,
    read_kinds,
    read_rope,
    read_stretch,
    read_window,
    stretch_keys,
    write_decoder,
    write_kinds,
)
from echelon.core.model_shape import ModelShape

WINDOW = 4096  # tokens
GEMMA2_EVERY = 2
"""Every so-many-th block of Gemma 2 is global where a config.json does not say which."""
GEMMA3_EVERY = 6
"""The same of Gemma 3."""
GEMMA2_CAPS = {"soft_cap": 50.0, "final_soft_cap": 30.0}
"""The caps of Gemma 2 where a config.json has no such keys."""
LOCAL_THETA = 10_000.0
"""The base of rotary frequencies of local blocks where a config.json has none."""
GLOBAL_THETA = 1_000_000.0
"""That of global blocks of Gemma 3."""
QUERY_SCALAR = 256
"""Scores are divided by its root where a config.json has no query_pre_attn_scalar."""

_CAPS = {"soft_cap": "attn_logit_softcapping", "final_soft_cap": "final_logit_softcapping"}


def _read_both(reader: ConfigJsonReader, every: int) -> None:
    """Read what Gemma 2 and 3 have in common, but for positions and caps."""
    read_counts(reader)
    reader.take(
        head_dim=("head_dim", 256),
        norm_eps=("rms_norm_eps", 1e-6),
        tied=("tie_word_embeddings", True),
        **ATTENTION_BIASES,
    )
    read_activation(reader, "hidden_activation", "gelu_pytorch_tanh")
    reader.only(use_bidirectional_attention=(None, False))
    reader.set("norm_offset", 1.0, "model_type")
    reader.set("norm_place", "both", "model_type")
    hidden = reader.config.get("hidden_size")
    if isinstance(hidden, int) and hidden > 0:
        reader.set("multipliers.embedding", hidden**0.5, "hidden_size")
    scalar = reader.config.get("query_pre_attn_scalar", QUERY_SCALAR)
    if isinstance(scalar, int | float) and scalar > 0:
        reader.set("attention_scale", scalar**-0.5, "query_pre_attn_scalar")
    else:
        reader.refuse("query_pre_attn_scalar", scalar, QUERY_SCALAR)
    _read_layers(reader, every)


def _read_layers(reader: ConfigJsonReader, every: int) -> None:
    listed, layers = reader.config.get("layer_types"), reader.config.get("num_hidden_layers")
    if isinstance(listed, list):
        kinds = ["local" if one == SLIDING else "global" for one in cast("list[object]", listed)]
    else:
        every = cast(int, reader.config.get("sliding_window_pattern", every))
        count = layers if isinstance(layers, int) else 0
        kinds = ["global" if (layer + 1) % every == 0 else "local" for layer in range(count)]
    if "local" in kinds:
        read_window(reader, WINDOW)
    if "model.window" in reader.entries:
        read_kinds(reader, kinds, "layer_types")


def _read_gemma2(reader: ConfigJsonReader) -> None:
    _read_both(reader, GEMMA2_EVERY)
    read_rope(reader, LOCAL_THETA)
    for name, key in _CAPS.items():
        # Absent it has a cap, null is none.
        value = reader.config.get(key, GEMMA2_CAPS[name])
        if value is not None:
            reader.set(name, value, key)


def _read_gemma3(reader: ConfigJsonReader) -> None:
    _read_both(reader, GEMMA3_EVERY)
    reader.set("qk_norm", True, "model_type")
    reader.take(final_soft_cap=(_CAPS["final_soft_cap"], None))
    why = ": transformers has the key, and caps no scores of this model"
    cap = reader.config.get(_CAPS["soft_cap"])
    if cap is not None:
        reader.refuse(_CAPS["soft_cap"], cap, None, why=why)
    given = reader.config.get("rope_parameters")
    tables = cast("dict[str, dict[str, object]]", given) if isinstance(given, dict) else {}
    if "full_attention" in tables:
        far, near = tables["full_attention"], tables.get("sliding_attention") or {}
        reader.set("rope_theta", far.get("rope_theta", GLOBAL_THETA), "rope_parameters")
        read_stretch(reader, "rope_parameters.full_attention", far)
        theta = near.get("rope_theta", LOCAL_THETA)
        if near.get("rope_type", "default") != "default":
            reader.refuse("rope_parameters.sliding_attention", near, {"rope_type": "default"})
    else:
        read_rope(reader, GLOBAL_THETA)
        theta = reader.config.get("rope_local_base_freq", LOCAL_THETA)
    kinds = reader.entries.get("model.layer_kinds")
    if kinds is not None:
        reader.set("local_rope_theta", theta, "rope_local_base_freq")
    elif "model.window" in reader.entries:
        # All blocks are local: their base is the base.
        reader.set("rope_theta", theta, "rope_local_base_freq")
        for name in [name for name in reader.entries if name.startswith("model.rope_scaling.")]:
            del reader.entries[name]


def _write_both(shape: ModelShape) -> Keys:
    return {
        **write_decoder(shape),
        **write_kinds(shape),
        "attention_bias": shape.qkv_bias,
        "final_logit_softcapping": shape.final_soft_cap,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _whole(shape.score_scale**-2),
        "sliding_window": shape.window or WINDOW,
    }


def _whole(number: float) -> float | int:
    """Return a number that is whole but for rounding as it was."""
    return round(number) if abs(number - round(number)) < 1e-9 * number else number


def _write_gemma2(shape: ModelShape) -> Keys:
    keys = {**_write_both(shape), "attn_logit_softcapping": shape.soft_cap}
    return keys if shape.window is not None else {**keys, **_all_global(shape)}


def _write_gemma3(shape: ModelShape) -> Keys:
    keys = _write_both(shape)
    far: Keys = {"rope_type": "default"}
    if shape.rope_scaling is not None:
        far = stretch_keys(shape.rope_scaling)
    near = shape.rope_theta if shape.local_rope_theta is None else shape.local_rope_theta
    tables = {
        "full_attention": {**far, "rope_theta": shape.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": near},
    }
    del keys["rope_scaling"], keys["rope_theta"]
    keys["rope_parameters"] = tables
    return keys if shape.window is not None else {**keys, **_all_global(shape)}


def _all_global(shape: ModelShape) -> Keys:
    return {"layer_types": ["full_attention"] * shape.layers}


_SHOWN = ("model.embed_tokens.weight", "model.layers.0.pre_feedforward_layernorm.weight")

GEMMAS = {
    "gemma2": Architecture(
        models="Gemma 2",
        name="Gemma2ForCausalLM",
        read=_read_gemma2,
        keys=_write_gemma2,
        taken="local and global blocks by turns, caps of scores and logits, norms around branches",
        tensors=_SHOWN,
        whole_heads=True,
    ),
    "gemma3_text": Architecture(
        models="Gemma 3 (text)",
        name="Gemma3ForCausalLM",
        read=_read_gemma3,
        keys=_write_gemma3,
        taken="local blocks with a base of their own, norms of heads and around branches",
        tensors=_SHOWN,
        whole_heads=True,
    ),
}
"""Each by its model_type."""
