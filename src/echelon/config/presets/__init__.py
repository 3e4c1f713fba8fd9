# SPDX-License-Identifier: Apache-2.0
"""Presets: runs, models and clusters that come with Echelon, as TOML files in `presets/`.

A preset is known by its file's name, in any spelling that `core/messages/names.py` takes for it,
and by what its `known_as` lists; families of models and vendors of devices have folders.
A model preset has a [model] table, and the [batch] with which the model was trained where that is
known; `extends` takes both, `model.preset` the model only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal, cast, get_args

from echelon.core.messages.names import find_name

PresetKind = Literal["runs", "models", "clusters"]
PRESET_KINDS: tuple[PresetKind, ...] = get_args(PresetKind)

_FOLDER = files("echelon.config.presets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Hold a preset file."""

    kind: PresetKind
    name: str
    tables: Mapping[str, object]
    known_as: tuple[str, ...] = ()
    """Its other names."""


@cache
def spellings(kind: PresetKind) -> Mapping[str, str]:
    """Return every name that a preset of this kind has, by the name of its file."""
    return {
        spelt: name for name in preset_names(kind) for spelt in (name, *_file(kind, name).known_as)
    }


def preset_names(kind: PresetKind) -> tuple[str, ...]:
    """Return the names of the presets of one kind, sorted."""
    return tuple(sorted(_preset_files(kind)))


def extendable_names() -> tuple[str, ...]:
    """Return the presets that `extends` takes: runs, then models."""
    return tuple(dict.fromkeys((*preset_names("runs"), *preset_names("models"))))


def read_preset(kind: PresetKind, name: str) -> Preset | None:
    """Return a preset, or None where there is none of this name, or more than one."""
    meant = name if name in _preset_files(kind) else find_name(name, spellings(kind))
    return None if meant is None else _file(kind, meant)


def read_extendable(name: str) -> Preset | None:
    """Return the run preset of this name, else the model preset, else None."""
    return read_preset("runs", name) or read_preset("models", name)


def about(kind: PresetKind, name: str) -> str:
    """Return the line that says what a preset is."""
    text = _preset_files(kind)[name].read_text(encoding="utf-8")
    return text.partition("\n")[0].lstrip("# ")


@cache
def _file(kind: PresetKind, name: str) -> Preset:
    tables = tomllib.loads(_preset_files(kind)[name].read_text(encoding="utf-8"))
    known_as = tuple(cast("list[str]", tables.pop("known_as", [])))
    return Preset(kind=kind, name=name, tables=tables, known_as=known_as)


@cache
def _preset_files(kind: PresetKind) -> Mapping[str, Traversable]:
    entries = tuple((_FOLDER / kind).iterdir())
    below = (file for entry in entries if entry.is_dir() for file in entry.iterdir())
    return {
        file.name.removesuffix(".toml"): file
        for file in (*entries, *below)
        if file.name.endswith(".toml")
    }
