# SPDX-License-Identifier: Apache-2.0
"""A folder of Hugging Face: the config.json of a shape, and which tensors it has in which files.

No table says which model_type has what: it is tried. Where none gives the shape, the refusal says
for the nearest one what it would compute otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

from echelon.config.entries import Entry
from echelon.config.model.architectures.common import OWN_TYPE, Architecture, Keys
from echelon.config.model.architectures.table import ARCHITECTURES
from echelon.config.model.hugging_face import NOT_IN_OWN_CONFIG, config_entries
from echelon.config.model.settings import build_model, derive_model
from echelon.config.plan_view import model_settings
from echelon.config.view import Unavailable, View
from echelon.core.errors import ConfigError, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, base_shape, router_biases
from echelon.core.rulebook.weights import WEIGHTS_HAVE_ARCHITECTURE, WEIGHTS_TYPE_NAMES_SHAPE
from echelon.core.rules import did_you_mean
from echelon.core.settings.value_types import toml_text
from echelon.interop.weight_names.names import ROUTER_BIAS, WeightNaming, find_naming
from echelon.interop.weight_names.source import ParameterSource

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

KEY = "--model-type"
OWN_WAY = "--to echelon"
"""The flag of an export that every model can take."""

_NO_TOKENS: Keys = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Where they are not said, transformers takes those of a family's first models: ids that a smaller
vocabulary does not have, and a row of padding that gets no gradient of what reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTensor:
    """Say what a tensor of the folder is made of: parameters by name, and where each lies in it."""

    key: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, ParameterSource], ...]

    @property
    def numel(self) -> int:
        """Return the number of its elements."""
        return prod(self.shape)


def folder_tensors(shape: ModelShape, architecture: Architecture) -> tuple[FolderTensor, ...]:
    """Return the tensors of a model, each of which is filled whole by its parts.

    A tied head is not among them: whoever reads the folder takes the embedding.
    """
    keys = {*architecture.tensors, *architecture.more_tensors(shape)}
    if router_biases(shape):
        keys.add(f"model.layers.0.mlp.gate{ROUTER_BIAS}")
    naming = find_naming(shape, keys)
    assert naming is not None, "a tensor of each architecture is known"
    assert not naming.nameless, f"{architecture.name} has no name for {naming.nameless}"
    return tensors_of(naming)


def own_tensors(shape: ModelShape) -> tuple[FolderTensor, ...]:
    """Return the tensors of a model in Echelon's own names: one for each parameter."""
    naming = find_naming(shape, {EMBEDDING, *(spec.name for spec in router_biases(shape))})
    assert naming is not None, "a parameter's own name is known"
    return tensors_of(naming)


def tensors_of(naming: WeightNaming) -> tuple[FolderTensor, ...]:
    """Return the tensors that parameters with these names make up, whole and without padding."""
    parts: dict[str, list[tuple[str, ParameterSource]]] = {}
    for name, source in naming.sources.items():
        parts.setdefault(source.key, []).append((name, source))
    return tuple(
        FolderTensor(key=key, shape=found[0][1].shape, parts=tuple(found))
        for key, found in parts.items()
    )


def share_out(
    tensors: Sequence[FolderTensor], item_bytes: int, file_bytes: int
) -> Mapping[str, tuple[FolderTensor, ...]]:
    """Return the files of the folder, each of at most `file_bytes` or of one tensor, in order."""
    groups: list[list[FolderTensor]] = [[]]
    held = 0
    for tensor in tensors:
        size = tensor.numel * item_bytes
        if groups[-1] and held + size > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += size
    if len(groups) == 1:
        return {SINGLE_NAME: tuple(groups[0])}
    return {
        f"model-{place:05d}-of-{len(groups):05d}.safetensors": tuple(group)
        for place, group in enumerate(groups, start=1)
    }


def index_text(files: Mapping[str, Sequence[FolderTensor]], item_bytes: int) -> str:
    """Return the index of several files: which tensor is in which."""
    total = sum(tensor.numel for group in files.values() for tensor in group)
    table = {tensor.key: name for name, group in files.items() for tensor in group}
    content = {
        "metadata": {"total_parameters": total, "total_size": total * item_bytes},
        "weight_map": dict(sorted(table.items())),
    }
    return json.dumps(content, indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """Hold the model_type that says a shape, and its keys."""

    model_type: str
    architecture: Architecture
    keys: Keys


def hub_config(shape: ModelShape, model_type: str | None = None) -> HubConfig:
    """Return the config.json of a shape, of one model_type or of the first that can say it.

    ConfigError (weights-have-architecture) with what would differ, where none can.
    """
    if model_type is not None and model_type not in ARCHITECTURES:
        close = did_you_mean(model_type, ARCHITECTURES)
        raise ConfigError(
            WEIGHTS_TYPE_NAMES_SHAPE.problem(
                f"{model_type} is no model_type that is written",
                key=KEY,
                suggestions=close or _fitting(shape),
            )
        )
    names = [model_type] if model_type is not None else list(ARCHITECTURES)
    missed: dict[str, list[str]] = {}
    for name in names:
        architecture = ARCHITECTURES[name]
        has = (shape.experts is not None, shape.latent is not None)
        if has != (architecture.experts, architecture.latent):
            continue
        keys: Keys = {
            "architectures": [architecture.name],
            "model_type": name,
            **_NO_TOKENS,
            **architecture.keys(shape),
        }
        refused = architecture.why_not(shape)
        differ = [refused] if refused else _differences(shape, keys)
        if not differ:
            return HubConfig(model_type=name, architecture=architecture, keys=keys)
        missed[name] = differ
    raise ConfigError(_refused(shape, model_type, missed))


def own_config(shape: ModelShape) -> dict[str, object]:
    """Return the keys of a config.json with every setting of a model, without its adapters."""
    keys: dict[str, Any] = {"model_type": OWN_TYPE}
    for key, value in model_settings(base_shape(shape)).items():
        if key in NOT_IN_OWN_CONFIG:
            continue
        *tables, name = key.split(".")
        place = keys
        for table in tables:
            place = place.setdefault(table, {})
        place[name] = value
    return keys


def shape_of_config(keys: Keys, name: str) -> ModelShape | None:
    """Return the shape that keys of a config.json mean; None where they cannot be read."""
    found, problems = config_entries(keys, Path("config.json"), "config.json")
    if problems:
        return None
    entries: dict[str, Entry] = dict(found)
    entries.update(derive_model(View(entries=entries), name))
    try:
        return build_model(View(entries=entries))
    except Unavailable:
        return None  # such as the width of heads, where it is said nowhere and can't be derived


def _differences(shape: ModelShape, keys: Keys) -> list[str]:
    """Return what a config.json would compute otherwise, as settings: ``qk_norm = true``."""
    back = shape_of_config(keys, shape.name)
    if back is None:
        return ["what it says of this model cannot be read back"]
    ours = _settings(shape)
    theirs = _settings(back)
    return [
        f"model.{name} = {toml_text(value)}, which would become {toml_text(theirs.get(name))}"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]


def _settings(shape: ModelShape) -> dict[str, object]:
    """Return every number of a shape that says what it computes, by name."""
    # How it was trained is no part of it, nor what was assumed, nor the width of an MLP that no
    # block has.
    plain = replace(shape, name="", dropout=0.0, initial_spread=0.0, assumed=(), assume=False)
    if not plain.has_dense_blocks:
        plain = replace(plain, ffn=0)
    found: dict[str, object] = {}
    for name, value in asdict(plain).items():
        if isinstance(value, dict):
            parts = cast("dict[str, object]", value)
            found.update({f"{name}.{part}": one for part, one in parts.items()})
        else:
            found[name] = "none" if value is None else value
    return found


def _refused(
    shape: ModelShape, model_type: str | None, missed: Mapping[str, Sequence[str]]
) -> Problem:
    if not missed:
        why = f"no architecture has the parts of {shape.name}"
        if model_type is not None:
            why = f"{model_type} has not the parts of {shape.name}: {_parts(shape)}"
        ways = _fitting(shape) or [OWN_WAY]
        return WEIGHTS_TYPE_NAMES_SHAPE.problem(why, key=KEY, suggestions=ways)
    nearest = min(missed, key=lambda name: len(missed[name]))
    return WEIGHTS_HAVE_ARCHITECTURE.problem(
        f"no architecture that is known says {shape.name}; the nearest is {nearest}, but for "
        f"{'; '.join(missed[nearest])}",
        key="model",
        suggestions=[OWN_WAY if model_type is None else f"{OWN_WAY}, without {KEY}"],
    )


def _parts(shape: ModelShape) -> str:
    experts = "experts" if shape.experts is not None else "no experts"
    latent = "latent attention" if shape.latent is not None else "no latent attention"
    return f"it has {experts} and {latent}"


def _fitting(shape: ModelShape) -> list[str]:
    has = (shape.experts is not None, shape.latent is not None)
    return [name for name, one in ARCHITECTURES.items() if (one.experts, one.latent) == has]
