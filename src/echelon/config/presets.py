"""Presets: runs, models and clusters that come with Echelon, as TOML files in `presets/`.

A model preset has a [model] table, and the [batch] with which the model was trained where that is
known; `extends` takes both, `model.preset` the model only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from echelon.config.toml_lines import key_lines

PresetKind = Literal["runs", "models", "clusters"]

_FOLDER = files(__package__ or "echelon.config") / "presets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Hold a preset file: its tables, and the line of each key."""

    kind: PresetKind
    name: str
    tables: Mapping[str, object]
    lines: Mapping[str, int]


def preset_names(kind: PresetKind) -> tuple[str, ...]:
    """Return the names of the presets of one kind, sorted."""
    names = (entry.name for entry in (_FOLDER / kind).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def extendable_names() -> tuple[str, ...]:
    """Return the presets that `extends` takes: runs, then models."""
    return tuple(dict.fromkeys((*preset_names("runs"), *preset_names("models"))))


def read_preset(kind: PresetKind, name: str) -> Preset | None:
    """Return a preset, or None where there is none of this name."""
    if name not in preset_names(kind):
        return None
    text = (_FOLDER / kind / f"{name}.toml").read_text(encoding="utf-8")
    return Preset(kind=kind, name=name, tables=tomllib.loads(text), lines=key_lines(text))


def read_extendable(name: str) -> Preset | None:
    """Return the run preset of this name, else the model preset, else None."""
    return read_preset("runs", name) or read_preset("models", name)


def about(preset: Preset) -> str:
    """Return the line that says what a preset is."""
    text = (_FOLDER / preset.kind / f"{preset.name}.toml").read_text(encoding="utf-8")
    return text.partition("\n")[0].lstrip("# ")
