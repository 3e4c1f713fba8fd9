# SPDX-License-Identifier: Apache-2.0
"""An import as text: the run.toml, the table of what became of each key, and its sums.

The run.toml always comes out. What is not taken, and what keeps the run from loading, stands at its
top as comments.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap

from echelon.config.load import absolute_entry
from echelon.config.presets import read_extendable
from echelon.config.schema import SETTINGS
from echelon.core.errors import Problem
from echelon.core.settings.value_types import toml_tables, toml_text
from echelon.interop.importer import Imported
from echelon.interop.key_reader import FATES, NOT_SET, Fate
from echelon.interop.tools import TOOLS

_COMMENT_COLUMN = 44  # column of text
_WEIGHT: Mapping[Fate, int] = {"refused": 0, "dropped": 1, "taken": 2, "without effect": 3}
"""Of several rows of a key the first of these says what became of it."""
_WIDTH = 96  # columns of a comment
_HEAD = "# Behind each # stands where a value comes from; all settings: echelon config show FILE\n"
_REFUSED = (
    "NOT TAKEN, although it would change the mathematics: --allow KEY says to go without it, "
    "--set table.key=value says it in words of Echelon."
)
_INVALID = "This run does not load until these are mended:"


def imported_toml(imported: Imported, folder: Path | None = None) -> str:
    """Return the run.toml of an imported run, to stand in `folder` (or where you are)."""
    head = (
        f"# Imported from {_comment(str(imported.path))} ({TOOLS[imported.kind].title}).\n{_HEAD}"
    )
    head += "".join(f"{line}\n" for line in _notes(imported))
    if imported.extends is not None:
        head += f"\nextends = {toml_text(_base(imported.extends, folder or Path()))}\n"
    values: dict[str, str] = {}
    for key, setting in SETTINGS.items():
        if (entry := imported.settings.get(key)) is not None:
            # A relative path would be another one in another folder.
            value = toml_text(absolute_entry(key, entry).value if setting.path else entry.value)
            width = max(0, _COMMENT_COLUMN - len(f"{key.rpartition('.')[2]} = "))
            source = _comment(entry.source.replace(f"{imported.path}: ", ""))
            values[key] = f"{value:<{width}}# {source}"
    return f"{head}\n{toml_tables(values)}"


def mapping_rows(imported: Imported) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, what became of it (a setting, or the fate) and why; a key is named once."""
    before = ""
    for row in imported.rows:
        became = f"{row.setting} = {toml_text(row.value)}" if row.setting else row.fate
        if row.rule:
            became = f"{row.fate}[{row.rule}]"
        same = row.key == before
        yield ("" if same else row.key, "" if same else row.given, became, row.why)
        before = row.key


def keys_by_fate(imported: Imported) -> dict[Fate, list[str]]:
    """Return the keys of the file by what became of them, each once.

    What the file leaves to a default of its tool is none of its keys.
    """
    fates: dict[str, Fate] = {}
    for row in sorted(imported.rows, key=lambda row: _WEIGHT[row.fate]):
        if not row.key.startswith("(") and row.given != NOT_SET:
            fates.setdefault(row.key, row.fate)
    ordered = dict.fromkeys(row.key for row in imported.rows if row.key in fates)
    return {fate: [key for key in ordered if fates[key] == fate] for fate in FATES}


def summary_lines(imported: Imported) -> Iterator[str]:
    """Yield the sums: how many keys were taken, have no effect, were dropped, are refused."""
    for fate, keys in keys_by_fate(imported).items():
        names = ", ".join(keys) if fate in ("dropped", "refused") else ""
        yield f"{fate:<16}{len(keys):>4}  {names}".rstrip()


def _notes(imported: Imported) -> Iterator[str]:
    for what in imported.assumptions:
        yield from _lines(f"Assumed: {what}")
    dropped = keys_by_fate(imported)["dropped"]
    if dropped:
        yield from _lines(f"Dropped by --allow: {', '.join(dropped)}")
    if imported.refused:
        yield "#"
        yield from _lines(_REFUSED)
        yield from _problems(imported.refused)
    if imported.invalid:
        yield "#"
        yield from _lines(_INVALID)
        yield from _problems(imported.invalid)


def _problems(problems: Iterable[Problem]) -> Iterator[str]:
    for problem in problems:
        yield from _lines(f"[{problem.rule}] {problem.message}", first="- ")


def _lines(text: str, *, first: str = "") -> Iterator[str]:
    indent = " " * (len(first) or 2)
    for line in wrap(
        _comment(f"{first}{text}"), _WIDTH, subsequent_indent=indent, break_on_hyphens=False
    ):
        yield f"# {line}"


def _comment(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _base(extends: str, folder: Path) -> str:
    """Return what a run builds on as it stands in a file of `folder`: a preset, or a path."""
    if read_extendable(extends) or Path(extends).is_absolute():
        return extends
    path = os.path.relpath(Path(extends).expanduser(), folder)
    return path if "/" in path else f"./{path}"
