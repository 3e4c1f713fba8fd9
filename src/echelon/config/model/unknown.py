# SPDX-License-Identifier: Apache-2.0
"""A config.json whose model_type is not known: what is assumed of it, or why nothing is.

It is planned as a decoder like Llama where its keys say how large it is. Each thing that is taken
to be so is told, beginning with the setting that changes it, and each key that is not understood.
A part that would make it another model (experts, an encoder, blocks without attention) is refused
by name: sizes of a decoder like Llama would say nothing of such a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from echelon.config.entries import Entry
from echelon.config.model.architectures.common import (
    FULL,
    SLIDING,
    ConfigJsonReader,
    read_activation,
    read_kinds,
    read_rope,
    read_window,
)
from echelon.core.settings.value_types import toml_text

ASSUMED_KEY = "model.assumed"
"""The setting that lists what is assumed."""
SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
"""Fields of [model] that a model cannot do without, and the keys that stand for them."""
FURTHER_SIZES: Mapping[str, tuple[str, ...]] = {
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
}
_DERIVED = {"kv_heads": "model.heads", "head_dim": "model.hidden / model.heads"}
_RMS_EPS = ("rms_norm_eps", "layer_norm_rms_eps", "norm_eps")
_LAYER_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_DEFAULTS: Mapping[str, tuple[tuple[str, ...], object]] = {
    "tied": (("tie_word_embeddings",), False),
    "initial_std": (("initializer_range",), 0.02),
    "qkv_bias": (("attention_bias", "qkv_bias", "use_qkv_bias"), False),
    "output_bias": (("attention_bias",), False),
    "mlp_bias": (("mlp_bias",), False),
    "qk_norm": (("qk_norm", "use_qk_norm"), False),
}
"""Settings, their keys, and what holds where none of these is there."""

_OTHER_PARTS = {
    "vision": "a part that reads images",
    "visual": "a part that reads images",
    "image": "a part that reads images",
    "patch_size": "a part that reads images",
    "video": "a part that reads videos",
    "audio": "a part that reads sound",
    "speech": "a part that reads sound",
    "encoder": "an encoder",
    "cross_attention": "attention to another model",
    "expert": "a mixture of experts",
    "moe": "a mixture of experts",
    "lora_rank": "latent attention",
    "ssm": "blocks with a state in place of attention",
    "mamba": "blocks with a state in place of attention",
    "state_size": "blocks with a state in place of attention",
    "d_state": "blocks with a state in place of attention",
    "linear_attn": "linear attention",
    "linear_conv": "linear attention",
    "alibi": "slopes of scores (ALiBi)",
}
"""What stands in keys of models that are no decoder like Llama, and what these have."""
_DECODERS = ("ForCausalLM", "LMHeadModel")
"""How classes of decoders of text end."""
_ROTARY_WORDS = ("rope", "rotary")
_WITHOUT_EFFECT = (
    *("_attn_implementation", "_name_or_path", "architectures", "auto_map", "dtype"),
    *("model_type", "pretraining_tp", "torch_dtype", "transformers_version", "use_cache"),
)


@dataclass(frozen=True, slots=True)
class _WatchedKeys(Mapping[str, object]):
    """Hold a config.json, and which of its keys were asked for."""

    config: Mapping[str, object]
    asked: set[str] = field(default_factory=set[str])

    def __getitem__(self, key: str) -> object:
        self.asked.add(key)
        return self.config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)


def why_nothing_is_assumed(config: Mapping[str, object]) -> str:
    """Return which part of a model makes it none like Llama, as `KEY: what it has`; "" for none."""
    for key, value in config.items():
        if not value:
            continue
        for sign, part in _OTHER_PARTS.items():
            if f"_{sign}" in f"_{key.lower()}":
                return f"{key}: {part}"
    kind = config.get("position_embedding_type") or "rope"
    if kind not in _ROTARY_WORDS:
        return f"position_embedding_type: positions that are {kind}"
    listed = config.get("architectures")
    names = [str(one) for one in cast("list[object]", listed)] if isinstance(listed, list) else []
    if names and not any(name.endswith(_DECODERS) for name in names):
        return f"architectures: {', '.join(names)}, which is no decoder of text"
    return ""


def has_sizes(config: Mapping[str, object]) -> bool:
    """Return whether a config.json says everything that a plan cannot do without."""
    return all(any(is_count(config.get(key)) for key in keys) for keys in SIZES.values())


def is_count(value: object) -> bool:
    """Return whether a value is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_unknown(reader: ConfigJsonReader) -> None:
    """Read a model of a model_type that is not known as a decoder like Llama.

    What is assumed goes into the entry `model.assumed`.
    """
    watched = _WatchedKeys(reader.config)
    seen = replace(reader, config=watched)
    kind = str(reader.config["model_type"])
    told = [
        f"model_type = {toml_text(kind)} is not known: its blocks are taken to be those of Llama, "
        "a norm before attention and one before the MLP, each added to the stream"
    ]
    for name, keys in SIZES.items():
        _take(seen, name, keys)
    for name, keys in FURTHER_SIZES.items():
        if not _take(seen, name, keys):
            told.append(f"model.{name} = {_DERIVED[name]}: there is no {keys[0]}")
    told += _read_norms(seen)
    _read_function(seen)
    told.append("model.gated = true: no key says whether the MLP has a gate")
    told += _read_positions(seen)
    for name, (keys, default) in _DEFAULTS.items():
        if not _take(seen, name, keys):
            told.append(_assume(seen, name, default, keys[0]))
    _read_windows(seen)
    told += [
        f"{key} = {toml_text(value)} is not understood, and taken to change nothing"
        for key, value in reader.config.items()
        if key not in watched.asked and value is not None and not _without_effect(key)
    ]
    place = f"{reader.path}: model_type"
    reader.entries[ASSUMED_KEY] = Entry(value=told, source=place)


def still_assumed(entry: Entry, changed: frozenset[str]) -> Entry:
    """Return the entry `model.assumed` without what other settings say by now."""
    told = [
        text for text in cast("list[str]", entry.value) if text.partition(" = ")[0] not in changed
    ]
    return replace(entry, value=told)


def _take(reader: ConfigJsonReader, name: str, keys: tuple[str, ...]) -> bool:
    """Set a setting to the value of the first of these keys that is there; say whether one is."""
    for key in keys:
        if reader.config.get(key) is not None:
            reader.set(name, reader.config[key], key)
            return True
    return False


def _assume(reader: ConfigJsonReader, name: str, value: object, key: str) -> str:
    """Set a setting to what holds where a key is absent, and return what is told of it."""
    source = f"assumed: {reader.path} has no {key}"
    reader.entries[f"model.{name}"] = Entry(value=value, source=source)
    return f"model.{name} = {toml_text(value)}: there is no {key}"


def _read_norms(reader: ConfigJsonReader) -> Iterator[str]:
    """Set the kind of norms and their eps, and yield what is assumed."""
    if _take(reader, "norm_eps", _RMS_EPS):
        yield 'model.norm = "rmsnorm": no key says which norms there are'
    elif _take(reader, "norm_eps", _LAYER_EPS):
        reader.set("norm", "layernorm", "its eps of layer norms")
        yield 'model.norm = "layernorm": there is an eps of layer norms'
    else:
        yield 'model.norm = "rmsnorm": no key says which norms there are'
        yield _assume(reader, "norm_eps", 1e-6, _RMS_EPS[0])


def _read_function(reader: ConfigJsonReader) -> None:
    key = next((key for key in _ACTIVATIONS if reader.config.get(key) is not None), _ACTIVATIONS[0])
    read_activation(reader, key, "silu")


def _read_positions(reader: ConfigJsonReader) -> Iterator[str]:
    """Set how positions turn, and yield what is assumed."""
    if reader.config.get("position_embedding_type") is None:
        yield 'model.positions = "rope": no key says how order enters'
    read_rope(reader, 10_000.0)
    theta = reader.entries.get("model.rope_theta")
    rope = reader.config.get("rope_parameters")
    inside = isinstance(rope, dict) and "rope_theta" in rope
    if theta is not None and not inside and "rope_theta" not in reader.config:
        yield _assume(reader, "rope_theta", theta.value, "rope_theta")


def _read_windows(reader: ConfigJsonReader) -> None:
    """Set the window of blocks that have one."""
    if reader.config.get("use_sliding_window") is False:
        return
    listed = reader.config.get("layer_types")
    read_window(reader, None)
    if isinstance(listed, list) and "model.window" in reader.entries:
        names = cast("list[object]", listed)
        if any(name not in (FULL, SLIDING) for name in names):
            return  # refused where all models are
        kinds = ["local" if name == SLIDING else "global" for name in names]
        if "local" in kinds:
            read_kinds(reader, kinds, "layer_types")
        else:
            del reader.entries["model.window"]


def _without_effect(key: str) -> bool:
    """Return whether a key says nothing of what is computed: ids of tokens, dropout, versions."""
    return key in _WITHOUT_EFFECT or key.endswith(("_token_id", "_dropout", "_pdrop", "dropout"))
