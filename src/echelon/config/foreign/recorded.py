"""Settings that stand in a foreign file for Echelon's eyes only: what its tool has no word for.

`echelon export` writes them: comments `# echelon: table.key = value` where a file may hold
comments, a table "echelon" in a JSON (DeepSpeed reads the keys that it knows). They stand below
what the file says in the tool's own words.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, flatten
from echelon.config.foreign.ledger import Row, shown
from echelon.config.foreign.sources import syntax_problem
from echelon.config.kinds import toml_text
from echelon.core.errors import ConfigError

PREFIX = "# echelon: "
TABLE, NOTES = "echelon", "notes"
WHY = "recorded by echelon export: the tool has no word for it, or takes it from elsewhere"


def recorded_lines(settings: Mapping[str, object]) -> list[str]:
    """Return the comments that record settings."""
    return [f"{PREFIX}{key} = {toml_text(value)}" for key, value in settings.items()]


def recorded_entries(path: Path, text: str) -> dict[str, Entry]:
    """Return the settings that a file records; ConfigError where they cannot be read."""
    found = _of_json(text) if text.lstrip().startswith("{") else _of_comments(path, text)
    source = f"{path}: {TABLE}"
    return {
        key: Entry(value=value, source=source, folder=path.parent) for key, value in found.items()
    }


def recorded_rows(entries: Mapping[str, Entry]) -> list[Row]:
    """Return what became of each recorded setting."""
    return [
        Row(key=TABLE, given=shown(entry.value), setting=key, value=entry.value, why=WHY)
        for key, entry in entries.items()
    ]


def _of_comments(path: Path, text: str) -> dict[str, object]:
    lines = [line.strip() for line in text.splitlines()]
    told = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    try:
        return dict(flatten(tomllib.loads("\n".join(told))))
    except (ValueError, RecursionError) as error:
        problem = syntax_problem(path, f"has lines {PREFIX!r} that are not TOML: {error}")
        raise ConfigError(problem) from error


def _of_json(text: str) -> dict[str, object]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}  # The reader of the file says what is wrong with it.
    table = cast("dict[str, object]", data).get(TABLE) if isinstance(data, dict) else None
    found = dict(flatten(cast("dict[str, object]", table))) if isinstance(table, dict) else {}
    return {key: value for key, value in found.items() if key != NOTES}
