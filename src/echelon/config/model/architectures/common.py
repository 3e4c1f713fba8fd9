# SPDX-License-Identifier: Apache-2.0
"""What the config.json of most architectures has in common, read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.config.model.architectures.record import Keys
from echelon.config.model.architectures.rotary import read_rope, write_rope
from echelon.config.model.config_json import ConfigJsonReader
from echelon.core.model_shape import Activation, ModelShape

FULL, SLIDING = "full_attention", "sliding_attention"
HEAD_DIM = ("head_dim", None)
ATTENTION_BIASES = dict.fromkeys(("qkv_bias", "output_bias"), ("attention_bias", False))

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu-exact",
}
"""What transformers calls the functions inside an MLP."""

ACTIVATION_NAMES: Mapping[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu_pytorch_tanh",
    "gelu-exact": "gelu",
}


def read_decoder(
    reader: ConfigJsonReader, *, theta: float = 10_000.0, part: float = 1.0, eps: float = 1e-6
) -> None:
    """Read what all but the GPTs have: counts, eps and base of positions, a gate."""
    read_counts(reader)
    reader.take(norm_eps=("rms_norm_eps", eps))
    read_activation(reader, "hidden_act", "silu")
    read_rope(reader, theta, part)


def read_counts(reader: ConfigJsonReader) -> None:
    """Read layers, widths and heads, under the names of most architectures."""
    reader.need(
        layers="num_hidden_layers",
        hidden="hidden_size",
        heads="num_attention_heads",
        ffn="intermediate_size",
        vocab="vocab_size",
        max_positions="max_position_embeddings",
    )
    reader.take(
        kv_heads=("num_key_value_heads", None),
        initial_std=("initializer_range", 0.02),
        tied=("tie_word_embeddings", False),
    )


def read_activation(reader: ConfigJsonReader, key: str, default: str) -> None:
    """Read the function inside an MLP, `default` where it is not said."""
    value = reader.config.get(key, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        reader.refuse(key, value, *ACTIVATIONS)
    elif ACTIVATIONS[value] != "silu":
        reader.set("activation", ACTIVATIONS[value], key)


def read_window(reader: ConfigJsonReader, default: int | None) -> None:
    """Set the window of every layer; null is none, and where it is absent `default` holds."""
    window = reader.config.get("sliding_window", default)
    if window is not None:
        reader.set("window", window, "sliding_window")


def write_decoder(shape: ModelShape) -> Keys:
    """Return the keys that most architectures have."""
    keys: Keys = {
        **write_counts(shape),
        "hidden_act": ACTIVATION_NAMES[shape.activation],
        "rms_norm_eps": shape.norm_eps,
        **write_rope(shape),
    }
    if not shape.causal:
        keys["is_causal"] = False
    return keys


def write_counts(shape: ModelShape) -> Keys:
    """Return layers, widths and heads, under the names of most architectures."""
    return {
        "hidden_size": shape.hidden,
        "initializer_range": shape.initial_std,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
    }


def read_kinds(reader: ConfigJsonReader, kinds: Sequence[str], key: str) -> None:
    """Set which blocks have the window: the fewest kinds that give all of them in turn."""
    if "global" not in kinds:
        return
    period = next(
        n
        for n in range(1, len(kinds) + 1)
        if all(kind == kinds[place % n] for place, kind in enumerate(kinds))
    )
    reader.set("layer_kinds", list(kinds[:period]), key)


def write_kinds(shape: ModelShape) -> Keys:
    """Return the kind of every block."""
    kinds = [shape.layer_kind(layer) for layer in range(shape.layers)]
    return {"layer_types": [SLIDING if kind == "local" else FULL for kind in kinds]}
