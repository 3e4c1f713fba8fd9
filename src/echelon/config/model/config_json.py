# SPDX-License-Identifier: Apache-2.0
"""What is taken out of a Hugging Face config.json, key by key, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry
from echelon.core.errors import Problem
from echelon.core.rulebook.model import HF_CONFIG_MISSING_KEY, HF_CONFIG_VALUE
from echelon.core.rules import did_you_mean

OWN_TYPE, OWN_TABLE = "echelon", "model"
"""The model_type of a config.json in Echelon's own settings, and the table that holds them."""
PLAIN_ROPE, DYNAMIC_ROPE = "default", "dynamic"
STRETCHES = ("llama3", "linear", "yarn", "longrope")
"""The kinds of rotary positions that are computed: plain, plain up to the positions of the model,
and stretched."""


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
