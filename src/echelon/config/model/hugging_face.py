# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face config.json -> settings of the model, for architectures that are computed exactly.

What is read is the shape. Dropout probabilities tell how a checkpoint was trained and are not read:
`model.dropout` says how yours is. A sliding window is `model.window`, and where only
some layers slide (Qwen's `max_window_layers`), `model.layer_kinds` says which. Qwen3-MoE's are not
the same in transformers 4 and 5: there the window shortens `max_positions`, up to which windowed
and full attention are the same. "dynamic" rotary positions change nothing up to the positions of
the model, and are read as plain ones. `unknown.py` plans what has a model_type that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, check_layer, flatten
from echelon.config.model.architectures.common import (
    FULL,
    OWN_TABLE,
    OWN_TYPE,
    SLIDING,
    ConfigJsonReader,
)
from echelon.config.model.architectures.table import ARCHITECTURES, NOT_COMPUTED
from echelon.config.model.unknown import (
    ASSUMED_KEY,
    FURTHER_SIZES,
    SIZES,
    has_sizes,
    is_count,
    read_unknown,
    why_nothing_is_assumed,
)
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
    for field, keys in {**SIZES, **FURTHER_SIZES}.items():
        value = next((config[key] for key in keys if is_count(config.get(key))), None)
        if value is not None:
            found.append(f"{field} = {toml_text(value)}")
        elif field in SIZES:
            lacking.append(f"{field} ({keys[0]})")
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
