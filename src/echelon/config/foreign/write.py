"""An imported run as text: its run.toml, and the table of what became of each key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from echelon.config.foreign.importer import TOOLS, Imported
from echelon.config.kinds import toml_text
from echelon.config.presets import read_extendable
from echelon.config.schema import SETTINGS

COMMENT_COLUMN = 44


def imported_toml(imported: Imported, folder: Path | None = None) -> str:
    """Return the run.toml of an imported run, to stand in `folder` (or where you are)."""
    return "\n".join(_lines(imported, folder or Path())) + "\n"


def mapping_rows(imported: Imported) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, setting ("-" for none) and reason; a key is named once."""
    before = ""
    for row in imported.rows:
        setting = f"{row.setting} = {toml_text(row.value)}" if row.setting else "-"
        same = row.key == before
        yield ("" if same else row.key, "" if same else row.given, setting, row.why)
        before = row.key


def _lines(imported: Imported, folder: Path) -> Iterator[str]:
    yield f"# Imported from {_comment(str(imported.path))} ({TOOLS[imported.kind]})."
    yield "# Behind each # stands where a value comes from; all settings: echelon config show FILE"
    if imported.extends is not None:
        yield ""
        yield f"extends = {toml_text(_base(imported.extends, folder))}"
    resolved = {row.key: row.value for row in imported.job.sources}
    tables: dict[str, list[str]] = {}
    for key, setting in SETTINGS.items():
        if (entry := imported.settings.get(key)) is not None:
            # A relative path would be another one in another folder.
            value = resolved[key] if setting.path else toml_text(entry.value)
            line = f"{key.rpartition('.')[2]} = {value}"
            source = _comment(entry.source.removeprefix(f"{imported.path}: "))
            tables.setdefault(setting.table, []).append(f"{line:<{COMMENT_COLUMN}}# {source}")
    for table, lines in tables.items():
        yield ""
        yield f"[{table}]"
        yield from lines


def _comment(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _base(extends: str, folder: Path) -> str:
    """Return what a run builds on as it stands in a file of `folder`: a preset, or a path."""
    if read_extendable(extends) or Path(extends).is_absolute():
        return extends
    path = os.path.relpath(Path(extends).expanduser(), folder)
    return path if "/" in path else f"./{path}"
