# SPDX-License-Identifier: Apache-2.0
"""Which adapters a folder of PEFT holds, and whether they are those of a run: read from headers.

No torch here: all of it is known before a rank starts. What is found is read as weights are, each
rank its rectangles, whatever the layout.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from echelon.config.model.settings import ALPHA_KEY, RANK_KEY, RSLORA_KEY, TARGETS_KEY
from echelon.core.choices.lora import LORA_LINEARS, Lora
from echelon.core.disk import list_names
from echelon.core.errors import CheckpointError, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.weights import ADAPTERS_FIT, ADAPTERS_PLAIN, ADAPTERS_READABLE
from echelon.core.rules import Rule
from echelon.core.serialize import decode_json
from echelon.core.settings.value_types import toml_text
from echelon.interop.hugging_face.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_places,
    layer_path,
    layers_named_by,
    require_adapters,
)
from echelon.interop.weight_names.source import ParameterSource
from echelon.training.weights.files import WeightFiles, read_headers
from echelon.training.weights.stored import DTYPE_SIZES, StoredTensor
from echelon.training.weights.trainers.contents import some

SETTING = "train.adapters"

MOVES_NO_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")
"""First values of adapters after which the weights below are as they were."""

_SAID_BY_TENSORS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
        *("revision", "task_type", "r", "lora_alpha", "use_rslora", "target_modules"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
        *("fan_in_fan_out", "init_lora_weights", "megatron_core", "qalora_group_size"),
        *("runtime_config", "loftq_config", "eva_config", "ensure_weight_tying"),
    }
)
"""Keys that are read, or that say nothing that tensors do not say. All others must be unset."""


def find_adapters(path: Path, shape: ModelShape) -> WeightFiles:
    """Return where a folder of PEFT keeps the adapters of a model.

    CheckpointError with all that keeps them from being those of `shape`, with the settings that
    would fit. Headers are read, and no tensor.
    """
    lora = require_adapters(shape)
    config = _read_config(path)
    try:
        stored = read_headers(path / ADAPTER_WEIGHTS)
    except CheckpointError as error:
        raise CheckpointError([replace(one, key=SETTING) for one in error.problems]) from error
    layers, together = layers_named_by(shape, stored)
    problems = [*_kind_problems(path, config), *_number_problems(path, config, lora)]
    shared = {one for one in map(layer_path, stored) if one in together}
    if shared:
        parts = ", ".join(one.rpartition(".")[2] for one in together[min(shared)])
        problems.append(
            _problem(
                ADAPTERS_PLAIN, f"{path} adapts {some(sorted(shared))}, which is {parts} in one"
            )
        )
    there = _layers_with_tensors(stored, {one.key: name for name, one in layers.items()})
    if not shared:
        problems += _layer_problems(path, there, shape, lora)
    places = adapter_places(shape, layers)
    if not problems:
        problems += _tensor_problems(path, stored, places)
    if problems:
        raise CheckpointError(problems)
    sources = {name: (stored[source.key], source) for name, source in places.items()}
    return WeightFiles(path=path, sources=sources)


def _read_config(path: Path) -> Mapping[str, object]:
    """Return what adapter_config.json says, once both files are there."""
    lacking = [one for one in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (path / one).is_file()]
    if lacking:
        seen = path if path.is_dir() else path.absolute().parent
        there = f"has no {' and no '.join(lacking)}" if path.is_dir() else "is no folder"
        raise CheckpointError(_problem(ADAPTERS_READABLE, f"{path} {there}: {list_names(seen)}"))
    try:
        config = decode_json((path / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        reason = f"{path / ADAPTER_CONFIG} cannot be read: {error}"
        raise CheckpointError(_problem(ADAPTERS_READABLE, reason)) from error
    if not isinstance(config, dict):
        reason = f"{path / ADAPTER_CONFIG} is JSON, and no object"
        raise CheckpointError(_problem(ADAPTERS_READABLE, reason))
    return cast("dict[str, object]", config)


def _kind_problems(path: Path, config: Mapping[str, object]) -> Iterator[Problem]:
    """Yield what of these adapters is more than two matrices beside a layer."""
    if config.get("peft_type") != "LORA":
        yield _problem(
            ADAPTERS_PLAIN,
            f'{path} has peft_type = {json.dumps(config.get("peft_type"))}, and "LORA" is read',
        )
    asked = {
        key: value
        for key, value in config.items()
        if key not in _SAID_BY_TENSORS and value and value != "none"
    }
    first = config.get("init_lora_weights", True)
    if first not in MOVES_NO_WEIGHTS:
        asked["init_lora_weights"] = first
    if asked:
        told = [f"{key} = {json.dumps(value)}" for key, value in asked.items()]
        yield _problem(ADAPTERS_PLAIN, f"{path} asks for {some(told)}, which is not computed here")


def _number_problems(path: Path, config: Mapping[str, object], lora: Lora) -> Iterator[Problem]:
    """Yield the rank and the scale that the files say otherwise than the run."""
    said: tuple[tuple[str, str, object, object], ...] = (
        ("r", RANK_KEY, config.get("r", 8), lora.rank),
        ("lora_alpha", ALPHA_KEY, config.get("lora_alpha", 8), lora.alpha),
        ("use_rslora", RSLORA_KEY, config.get("use_rslora", False), lora.rslora),
    )
    for key, setting, theirs, ours in said:
        if theirs != ours:
            value = float(theirs) if setting == ALPHA_KEY and type(theirs) is int else theirs
            yield ADAPTERS_FIT.problem(
                f"{path} has {key} = {json.dumps(theirs)}, and {setting} = {toml_text(ours)}",
                key=setting,
                suggestions=(f"{setting} = {toml_text(value)}",),
            )


def _layers_with_tensors(
    stored: Collection[str], names: Mapping[str, str]
) -> dict[str, dict[str, None]]:
    """Return by our name of a linear layer the layers of blocks that the files adapt."""
    found: dict[str, dict[str, None]] = {}
    for key in stored:
        layer = names.get(f"{layer_path(key)}.weight", "")
        if layer:
            found.setdefault(layer.rpartition(".")[2], {})[layer] = None
    return found


def _layer_problems(
    path: Path, there: Mapping[str, Collection[str]], shape: ModelShape, lora: Lora
) -> Iterator[Problem]:
    """Yield that other layers are adapted than the run asks for, or not in every block."""
    found = tuple(name for name in LORA_LINEARS if name in there)
    if found != lora.targets:
        works = [f"{TARGETS_KEY} = {toml_text(list(found))}"] if found else []
        yield ADAPTERS_FIT.problem(
            f"{path} adapts {', '.join(found) or 'no layer of the model'}, and {TARGETS_KEY} is "
            f"{', '.join(lora.targets)}",
            key=TARGETS_KEY,
            suggestions=works,
        )
        return
    few = [f"{name} in {len(there[name])}" for name in found if len(there[name]) < shape.layers]
    if few:
        yield _problem(
            ADAPTERS_FIT,
            f"{path} adapts {some(few)} of {shape.layers} blocks, and a run adapts them in each",
        )


def _tensor_problems(
    path: Path, stored: Mapping[str, StoredTensor], places: Mapping[str, ParameterSource]
) -> Iterator[Problem]:
    """Yield tensors that lack, that have no place, or that have another shape or dtype."""
    wanted = {one.key: one for one in places.values()}
    lacking = [key for key in wanted if key not in stored]
    unknown = [key for key in stored if key not in wanted]
    if lacking:
        yield _problem(ADAPTERS_FIT, f"{path} lacks {some(lacking)}")
    if unknown:
        yield _problem(ADAPTERS_FIT, f"{path} holds what has no place here: {some(unknown)}")
    wrong = [
        f"{key} is {list(stored[key].shape)} there, {list(one.shape)} here"
        for key, one in wanted.items()
        if key in stored and stored[key].shape != one.shape
    ]
    if wrong:
        yield _problem(ADAPTERS_FIT, f"{path} is of another model: {some(wrong)}")
    packed = [f"{key} ({one.dtype})" for key, one in stored.items() if one.dtype not in DTYPE_SIZES]
    if packed:
        yield _problem(ADAPTERS_FIT, f"{path} holds no plain floating point: {some(packed)}")


def _problem(rule: Rule, message: str) -> Problem:
    return rule.problem(message, key=SETTING)
