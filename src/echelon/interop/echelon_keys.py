# SPDX-License-Identifier: Apache-2.0
"""Settings that stand in a foreign file for Echelon's eyes only: what its tool has no word for.

`echelon export` writes them: comments `# echelon: table.key = value` where a file may hold
comments, a table "echelon" in a JSON (DeepSpeed reads the keys that it knows). They stand below
what the file says in the tool's own words.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, flatten
from echelon.config.settings.value_types import toml_text
from echelon.core.errors import ConfigError
from echelon.core.serialize import decode_json
from echelon.interop.key_reader import KeyOutcome, json_text
from echelon.interop.parsing import syntax_problem

PREFIX = "# echelon: "
TABLE, NOTES = "echelon", "notes"
WHY = "recorded by echelon export: the tool has no word for it, or takes it from elsewhere"


def recorded_lines(settings: Mapping[str, object]) -> list[str]:
    """Return the comments that record settings."""
    return [f"{PREFIX}{key} = {toml_text(value)}" for key, value in settings.items()]


def recorded_entries(path: Path, text: str) -> dict[str, Entry]:
    """Return the settings that a file records; ConfigError where they cannot be read."""
    found = (
        _entries_from_json(text)
        if text.lstrip().startswith("{")
        else _entries_from_comments(path, text)
    )
    source = f"{path}: {TABLE}"
    return {
        key: Entry(value=value, source=source, folder=path.parent) for key, value in found.items()
    }


def recorded_rows(entries: Mapping[str, Entry]) -> list[KeyOutcome]:
    """Return what became of each recorded setting."""
    return [
        KeyOutcome(key=TABLE, given=json_text(entry.value), setting=key, value=entry.value, why=WHY)
        for key, entry in entries.items()
    ]


def _entries_from_comments(path: Path, text: str) -> dict[str, object]:
    lines = [line.strip() for line in text.splitlines()]
    recorded = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    try:
        return dict(flatten(tomllib.loads("\n".join(recorded))))
    except (ValueError, RecursionError) as error:
        problem = syntax_problem(path, f"has lines {PREFIX!r} that are not TOML: {error}")
        raise ConfigError(problem) from error


def _entries_from_json(text: str) -> dict[str, object]:
    try:
        data = decode_json(text)
    except ValueError:
        return {}  # The reader of the file says what is wrong with it.
    table = cast("dict[str, object]", data).get(TABLE) if isinstance(data, dict) else None
    found = dict(flatten(cast("dict[str, object]", table))) if isinstance(table, dict) else {}
    return {key: value for key, value in found.items() if key != NOTES}
