# SPDX-License-Identifier: Apache-2.0
"""An architecture, the reader of config.json files, and what these have in common.

Rotary positions, MLPs and heads are read alike for most architectures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeGuard, cast

from echelon.config.entries import Entry
from echelon.core.errors import Problem
from echelon.core.model_shape import (
    NEEDED_BY_KIND,
    READ_BY_KIND,
    Activation,
    ModelShape,
    RopeKind,
    RopeScaling,
)
from echelon.core.rulebook.model import HF_CONFIG_MISSING_KEY, HF_CONFIG_VALUE
from echelon.core.rules import did_you_mean

Keys: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Hold both ways between the config.json of a model_type and a shape."""

    models: str
    """Whose models have it."""
    name: str
    """Its class in transformers."""
    read: Callable[[ConfigJsonReader], None]
    """Takes the settings of a model out of a config.json."""
    keys: Callable[[ModelShape], Keys]
    """Says a shape in its keys; what it has no key for is not looked at."""
    taken: str
    """What of its blocks is computed, in words."""
    tensors: tuple[str, ...] = ("model.embed_tokens.weight",)
    """Some of its tensors, by which its names are known."""
    experts: bool = False
    """Whether its models have experts."""
    latent: bool = False
    """Whether they have latent attention."""
    whole_heads: bool = False
    """Whether transformers wants the width of the stream to be a multiple of the heads, though they
    may have any width."""

    def more_tensors(self, shape: ModelShape) -> tuple[str, ...]:
        """Return what shows the names of some of its models."""
        if self.name == "FalconForCausalLM" and shape.residual == "parallel":
            return ("transformer.h.0.ln_mlp.weight",)
        return ()

    def why_not(self, shape: ModelShape) -> str:
        """Return what transformers would refuse; "" where it reads the shape."""
        if self.whole_heads and shape.hidden % shape.heads:
            return (
                f"model.hidden = {shape.hidden} is no multiple of model.heads = {shape.heads} "
                f"({shape.hidden} % {shape.heads} = {shape.hidden % shape.heads}), which "
                f"{self.name} wants"
            )
        return ""


ORIGINAL = "original_max_position_embeddings"
_NAMES = {
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "slow_turns": "beta_slow",
    "fast_turns": "beta_fast",
    "whole_dims": "truncate",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "attention_factor": "attention_factor",
}
"""What transformers calls fields of a stretch."""


def read_rope(reader: ConfigJsonReader, theta: float, part: float = 1.0) -> None:
    """Read how positions turn.

    `theta`, and `part` of a head that turns, hold where nothing is said.
    """
    key, value = rope_entry(reader.config)
    if value is not None and not isinstance(value, dict):
        reader.refuse(key, value)
        return
    rope = cast("dict[str, object]", value or {})
    reader.set("rope_theta", rope.get("rope_theta", reader.config.get("rope_theta", theta)), key)
    fraction = rope.get("partial_rotary_factor", reader.config.get("partial_rotary_factor", part))
    if fraction != 1.0:
        reader.set("rotary.fraction", fraction, key)
    read_stretch(reader, key, rope)


def read_stretch(reader: ConfigJsonReader, key: str, rope: dict[str, object]) -> None:
    """Read what stretches frequencies, of the table `rope` under `key`.

    "dynamic" changes nothing up to the positions that a model has.
    """
    kind = rope_type(rope)
    if kind in (PLAIN_ROPE, DYNAMIC_ROPE):
        return
    if not is_stretch(kind):
        reader.refuse(key, rope, *({"rope_type": one} for one in (PLAIN_ROPE, *READ_BY_KIND)))
        return
    # Kinds that were not there from the first are named; the first is what a table means.
    if kind != "llama3":
        reader.set("rope_scaling.kind", kind, key)
    longest, original = (
        reader.config.get("max_position_embeddings"),
        reader.config.get(ORIGINAL, rope.get(ORIGINAL)),
    )
    factor = rope.get("factor")
    if kind in ("yarn", "longrope"):
        original = longest if original is None else original
        factor = _ratio(longest, original) if factor is None else factor
    _set_or_miss(reader, key, kind, "factor", "factor", factor)
    if kind != "linear":
        _set_or_miss(reader, key, kind, "original_positions", ORIGINAL, original)
    for name in (name for name in READ_BY_KIND[kind] if name in _NAMES):
        value = rope.get(_NAMES[name])
        if name in NEEDED_BY_KIND[kind] or value is not None:
            _set_or_miss(reader, key, kind, name, _NAMES[name], value)
    if kind == "yarn" and rope.get("attention_factor") is None:
        _read_mscale(reader, key, rope, factor)


def _set_or_miss(
    reader: ConfigJsonReader, key: str, kind: str, name: str, hf_name: str, value: object
) -> None:
    if value is not None:
        reader.set(f"rope_scaling.{name}", value, f"{key}.{hf_name}")
    else:
        reader.missing(f"{key}.{hf_name}, which {kind} scaling needs", reader.where(key))


def _ratio(longest: object, original: object) -> object:
    if not isinstance(longest, int) or not isinstance(original, int) or original <= 0:
        return None
    return max(1.0, longest / original)


def _read_mscale(
    reader: ConfigJsonReader, key: str, rope: dict[str, object], factor: object
) -> None:
    """Read the factor of cosines as DeepSeek says it: a ratio of two sharpenings."""
    ours, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    numbers = [one for one in (ours, whole, factor) if isinstance(one, int | float)]
    if ours and whole and len(numbers) == 3:
        found = sharpening(numbers[2], numbers[0]) / sharpening(numbers[2], numbers[1])
        reader.set("rope_scaling.attention_factor", found, f"{key}.mscale")


def sharpening(factor: float, mscale: float) -> float:
    """Return by what YaRN sharpens scores, its root (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def write_rope(shape: ModelShape) -> Keys:
    """Return how positions turn."""
    keys: Keys = {"rope_scaling": None, "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        keys["rope_scaling"] = stretch_keys(shape.rope_scaling)
    return keys


def stretch_keys(scaling: RopeScaling) -> Keys:
    """Return the keys of a stretch, the base apart."""
    keys: Keys = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_positions is not None:
        keys[ORIGINAL] = scaling.original_positions
    for name in (name for name in READ_BY_KIND[scaling.kind] if name in _NAMES):
        value = getattr(scaling, name)
        if value is not None:
            keys[_NAMES[name]] = (
                list(cast("tuple[float, ...]", value)) if isinstance(value, tuple) else value
            )
    return keys


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


OWN_TYPE, OWN_TABLE = "echelon", "model"
"""The model_type of a config.json in Echelon's own settings, and the table that holds them."""
PLAIN_ROPE, DYNAMIC_ROPE = "default", "dynamic"
"""Kinds of rotary positions without a stretch, up to the positions of the model."""


def is_stretch(kind: object) -> TypeGuard[RopeKind]:
    """True for a kind of rotary positions that stretches them by a formula."""
    return isinstance(kind, str) and kind in READ_BY_KIND


def rope_entry(config: Mapping[str, object]) -> tuple[str, object]:
    """Return the key that says how positions turn, and its value, if any."""
    if config.get("model_type") == OWN_TYPE:
        table = config.get(OWN_TABLE)
        model = cast("dict[str, object]", table) if isinstance(table, dict) else {}
        return f"{OWN_TABLE}.rope_scaling", model.get("rope_scaling")
    # transformers 5 keeps both under rope_parameters, before that they were two keys.
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    return key, config.get(key)


def rope_type(rope: object) -> object:
    """Return the kind of rotary positions that the value of that key says."""
    if not isinstance(rope, dict):
        return PLAIN_ROPE
    table = cast("dict[str, object]", rope)
    names = ("rope_type", "type", "kind")  # the last one is Echelon's own
    return next((table[name] for name in names if name in table), PLAIN_ROPE)


@dataclass(slots=True)
class ConfigJsonReader:
    """Take values out of a config.json, noting what is missing, unsupported, and taken."""

    path: Path
    config: Mapping[str, object]
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    problems: list[Problem] = field(default_factory=list[Problem])

    def where(self, key: str) -> str:
        """Return what to call the place of a key."""
        return f"{self.path}: {key}"

    def set(self, name: str, value: object, key: str) -> None:
        """Set `model.name` to a value that comes from `key`."""
        self.entries[f"model.{name}"] = Entry(value=value, source=self.where(key))

    def need(self, part: str = "", /, **keys: str) -> None:
        """Set each setting of `part` ("experts.") to the value of its key, which must be there."""
        wanted = {*keys.values()}
        for name, key in keys.items():
            if self.config.get(key) is not None:
                self.set(f"{part}{name}", self.config[key], key)
                continue
            close = did_you_mean(key, [one for one in self.config if one not in wanted])
            hint = f"; did you mean to write {close[0]}?" if close else ""
            kind = self.config["model_type"]
            self.missing(f"{key}, which a {kind} model needs{hint}", str(self.path))

    def missing(self, what: str, set_by: str) -> None:
        """Note that a key is missing, and what needs it."""
        message = f"{self.path} has no {what}"
        self.problems.append(
            HF_CONFIG_MISSING_KEY.problem(message, key="model.hf_config", set_by=set_by)
        )

    def take(self, part: str = "", /, **keys: tuple[str, object]) -> None:
        """Set each setting of `part` to the value of its key, else to the default beside it."""
        for name, (key, default) in keys.items():
            value = self.config.get(key)
            value = default if value is None else value
            if value is not None:
                self.set(f"{part}{name}", value, key)

    def only(self, **keys: tuple[object, ...]) -> None:
        """Refuse a value of a key that is none of these; the first is what absence means."""
        for key, supported in keys.items():
            value = self.config.get(key, supported[0])
            if value not in supported:
                self.refuse(key, value, *supported)

    def refuse(self, key: str, value: object, *supported: object, why: str = "") -> None:
        """Note that the value of a key is not supported."""
        self.problems.append(
            HF_CONFIG_VALUE.problem(
                f"{key} = {json.dumps(value, default=str)} is not supported for "
                f"{self.config['model_type']}{why}",
                key="model.hf_config",
                set_by=self.where(key),
                suggestions=[json.dumps(item) for item in supported],
            )
        )
