# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face config.json -> settings of the model: read exactly, or assumed to be like Llama.

What is read is the shape. Dropout probabilities tell how a checkpoint was trained and are not read:
`model.dropout` says how yours is. A sliding window is `model.window`, and where only
some layers slide (Qwen's `max_window_layers`), `model.layer_kinds` says which. Qwen3-MoE's are not
the same in transformers 4 and 5: there the window shortens `max_positions`, up to which windowed
and full attention are the same. "dynamic" rotary positions change nothing up to the positions of
the model, and are read as plain ones.

A config.json whose model_type is not known is planned as a decoder like Llama where its keys say
how large it is. Each thing that is taken to be so is told, beginning with the setting that changes
it, and each key that is not understood. A part that would make it another model (experts, an
encoder, blocks without attention) is refused by name: sizes of a decoder like Llama would say
nothing of such a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, check_layer, flatten
from echelon.config.model.architectures.common import (
    FULL,
    OWN_TABLE,
    OWN_TYPE,
    SLIDING,
    ConfigJsonReader,
    read_activation,
    read_kinds,
    read_rope,
    read_window,
)
from echelon.config.model.architectures.table import ARCHITECTURES, NOT_COMPUTED
from echelon.config.reading import is_folder, missing_file
from echelon.config.schema import MODEL_SOURCES
from echelon.core.errors import Problem
from echelon.core.rulebook.model import (
    HF_CONFIG_MISSING_KEY,
    HF_CONFIG_MODEL_TYPE,
    HF_CONFIG_UNREADABLE,
    HF_CONFIG_VALUE,
)
from echelon.core.rules import did_you_mean
from echelon.core.serialize import decode_json
from echelon.core.settings.value_types import toml_text

ASSUMED_KEY = "model.assumed"
"""The setting that lists what is assumed."""
CAPPED = ("gemma2", "gemma3_text")
"""What has caps on scores and logits."""

_BESIDE_A_DECODER = {
    "vision_config": "a part that reads images",
    "audio_config": "a part that reads sound",
    "speech_config": "a part that reads sound",
    "is_encoder_decoder": "an encoder",
}
"""Keys of models that are more than a decoder, and what they have."""


def read_hf_config(path: Path, set_by: str) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the `model.*` entries of a config.json (or of the folder that holds one)."""
    if is_folder(path):
        path = path / "config.json"
    try:
        data = decode_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, [missing_file(path, error, set_by)]
    except ValueError as error:
        return {}, [_unreadable(path, f"is not JSON: {error}", set_by)]
    if not isinstance(data, dict):
        return {}, [_unreadable(path, "is not a JSON object", set_by)]
    if "mathematics" in data and (run := path.with_name("run.toml")).is_file():
        why = "is the plan of a run, whose settings are beside it"
        return {}, [_unreadable(path, why, set_by, str(run))]
    return config_entries(cast("dict[str, object]", data), path, set_by)


def config_entries(
    config: Mapping[str, object], path: Path, set_by: str
) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the `model.*` entries of what stands in a config.json, `path` in messages."""
    kind = config.get("model_type")
    if kind == OWN_TYPE:
        return own_entries(config, path, set_by)
    beside = [key for key in _BESIDE_A_DECODER if config.get(key)]
    if beside:
        problem = HF_CONFIG_MODEL_TYPE.problem(
            f"{path} has {', '.join(beside)}: {_BESIDE_A_DECODER[beside[0]]}, and only decoders of "
            "text are computed",
            key="model.hf_config",
            set_by=set_by,
        )
        return {}, [problem]
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None and (problem := _why_refused(config, path, set_by)) is not None:
        return {}, [problem]
    reader = ConfigJsonReader(path=path, config=config)
    read = read_unknown if known is None else known.read
    read(reader)
    _scores(reader)
    entries, problems = check_layer(reader.entries)
    return dict(entries), reader.problems + problems


def _why_refused(config: Mapping[str, object], path: Path, set_by: str) -> Problem | None:
    """Return why a config.json of an architecture that is not known is not even planned."""
    kind = config.get("model_type")
    named = f"model_type = {toml_text(kind)}" if kind else "no model_type"
    lacks = NOT_COMPUTED.get(str(kind))
    other = why_nothing_is_assumed(config)
    if kind and not lacks and other:
        return HF_CONFIG_MODEL_TYPE.problem(
            f"{path} has {named}, which is not known, and {other}; only decoders like Llama are "
            "assumed of an architecture that is not known",
            key="model.hf_config",
            set_by=set_by,
        )
    if isinstance(kind, str) and kind and not lacks and has_sizes(config):
        return None
    how = f"is not computed: {lacks}" if lacks else "is not known"
    return HF_CONFIG_MODEL_TYPE.problem(
        f"{path} has {named}; that architecture {how}. If its blocks are those of one "
        f"that is, a run.toml can have {fields_text(config)}",
        key="model.hf_config",
        set_by=set_by,
        suggestions=did_you_mean(str(kind), ARCHITECTURES) or ARCHITECTURES,
    )


def _unreadable(path: Path, why: str, set_by: str, *instead: str) -> Problem:
    return HF_CONFIG_UNREADABLE.problem(
        f"{path} {why}", key="model.hf_config", set_by=set_by, suggestions=instead
    )


def _scores(reader: ConfigJsonReader) -> None:
    """Read which keys a query meets in whatever model, and refuse caps of what has none."""
    reader.take(causal=("is_causal", None))
    if reader.config.get("is_causal") is False and "model.window" in reader.entries:
        # transformers counts one key more on each side of a query then, flash-attention does not.
        reader.refuse("is_causal", False, True)
    if reader.config["model_type"] not in CAPPED:
        reader.only(attn_logit_softcapping=(None,), final_logit_softcapping=(None,))
    listed = reader.config.get("layer_types")
    if listed is None:
        return
    windowed = {"use_sliding_window", "sliding_window"}.intersection(reader.config)
    known = (FULL, SLIDING) if windowed else (FULL,)
    kinds = cast("list[object]", listed) if isinstance(listed, list) else [listed]
    for kind in dict.fromkeys(map(str, kinds)):
        if kind not in known:
            reader.refuse("layer_types", kind, *known)


def fields_text(config: Mapping[str, object]) -> str:
    """Return what a [model] must say: fields that a config.json has, and those that it lacks.

    ``[model] with layers = 32, hidden = 4096, which the file has, and heads, which it lacks``.
    """
    found: list[str] = []
    lacking: list[str] = []
    for size, keys in {**SIZES, **FURTHER_SIZES}.items():
        value = next((config[key] for key in keys if is_count(config.get(key))), None)
        if value is not None:
            found.append(f"{size} = {toml_text(value)}")
        elif size in SIZES:
            lacking.append(f"{size} ({keys[0]})")
    parts = [f"{', '.join(found)}, which the file has"] if found else []
    parts += [f"{', '.join(lacking)}, which it lacks"] if lacking else []
    return f"[model] with {', and '.join(parts)}"


NOT_IN_OWN_CONFIG = (*MODEL_SOURCES, ASSUMED_KEY, "model.assume")
"""Settings of [model] for another source of the model, and for assumptions about one."""


def own_entries(
    config: Mapping[str, object], path: Path, set_by: str
) -> tuple[dict[str, Entry], list[Problem]]:
    """Return the `model.*` entries of such a config.json, `path` in messages."""
    table = config.get(OWN_TABLE)
    if not isinstance(table, dict):
        problem = HF_CONFIG_MISSING_KEY.problem(
            f"{path} has no table {OWN_TABLE}, which a config.json of model_type {OWN_TYPE} needs",
            key="model.hf_config",
            set_by=set_by,
        )
        return {}, [problem]
    settings = dict(flatten(cast("dict[str, object]", table), f"{OWN_TABLE}."))
    entries, problems = check_layer(
        {
            key: Entry(value=value, source=f"{path}: {key}", folder=path.parent)
            for key, value in settings.items()
            if key not in NOT_IN_OWN_CONFIG
        }
    )
    problems += [
        HF_CONFIG_VALUE.problem(
            f"{key} has no place in a config.json of model_type {OWN_TYPE}, which holds the whole "
            "model itself",
            key="model.hf_config",
            set_by=f"{path}: {key}",
        )
        for key in NOT_IN_OWN_CONFIG
        if key in settings
    ]
    return dict(entries), problems


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
