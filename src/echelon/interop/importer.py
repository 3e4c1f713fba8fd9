"""A file of another tool -> a run that loads: recognised, every key judged, the whole checked.

As text it is a run.toml, and the table of what became of each key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.config.entries import Entry, merge
from echelon.config.job import Job
from echelon.config.load import resolve, run_name_of
from echelon.config.presets import read_extendable
from echelon.config.setting_layers import SettingLayers, gather_layers, parse_set_flags
from echelon.config.settings.schema import SETTINGS
from echelon.config.settings.value_types import toml_tables, toml_text
from echelon.core.errors import ConfigError
from echelon.core.rulebook.imports import IMPORT_KIND
from echelon.interop.echelon_keys import TABLE, recorded_entries, recorded_rows
from echelon.interop.horovod.words import parse_horovod
from echelon.interop.import_context import import_context
from echelon.interop.key_reader import KeyOutcome, KeyReader
from echelon.interop.parsing import (
    flatten_keys,
    parse_command,
    parse_json,
    parse_toml,
    parse_yaml,
    read_text,
)
from echelon.interop.tools import TOOLS, ToolName, recognition_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Hold what an import gave: what became of each key, and the run that it makes.

    `settings` are those that the file and the --set flags set, over what `extends` names.
    """

    kind: ToolName
    path: Path
    extends: str | None
    rows: tuple[KeyOutcome, ...]
    settings: Mapping[str, Entry]
    job: Job


def import_file(
    path: Path,
    *,
    kind: ToolName | None = None,
    extends: str | None = None,
    ranks: int | None = None,
    sets: Sequence[str] = (),
) -> Imported:
    """Return the run that a configuration of another tool describes.

    It builds on `extends` (a preset or run file), with `sets` on top. ConfigError has every problem
    of the file and of the run that it would make.
    """
    text = read_text(path)
    kind = kind or detect_tool(path, text)
    recorded = recorded_entries(path, text)
    if extends is None and not any(key.startswith("model.") for key in recorded):
        extends = TOOLS[kind].base
    gathered = gather_layers(extends, ()) if extends else SettingLayers()
    gathered.add(recorded)
    over, problems = parse_set_flags(sets)
    given = parse_keys(kind, path, text)
    context = import_context(merge([*gathered.layers, over]), ranks)
    reader = KeyReader(tool=TOOLS[kind].title, path=str(path), given=given)
    TOOLS[kind].read_keys(reader, context)
    gathered.problems.extend([*problems, *reader.problems])
    gathered.add(reader.entries)
    gathered.add(over)
    job = resolve(gathered, run_name_of(path), None)
    return Imported(
        kind=kind,
        path=path,
        extends=extends,
        rows=(*reader.rows, *recorded_rows(recorded)),
        settings={**recorded, **reader.entries, **over},
        job=job,
    )


def detect_tool(path: Path, text: str) -> ToolName:
    """Return the tool whose file this is, by its content; ConfigError where it does not tell."""
    for tool in recognition_order():
        if tool.pattern.search(text):
            return tool.name
    signs = ", nor ".join(tool.signs for tool in recognition_order())
    raise ConfigError(
        IMPORT_KIND.problem(
            f"{path} is neither {signs}",
            key="--from",
            set_by=str(path),
            suggestions=[f"--from {name}" for name in TOOLS],
        )
    )


def parse_keys(kind: ToolName, path: Path, text: str) -> Mapping[str, object]:
    """Return the keys of a file, with dots, and their values; ConfigError where it is not one."""
    form = TOOLS[kind].form
    if kind == "horovod":
        return parse_horovod(path, text)
    if form == "command":
        return parse_command(path, text)
    if form == "toml":
        return dict(flatten_keys(parse_toml(path, text)))
    if form == "yaml" and not text.lstrip().startswith("{"):
        return dict(flatten_keys(parse_yaml(path, text)))
    tables = parse_json(path, text)
    if isinstance(tables.get(TABLE), dict):
        tables = {key: value for key, value in tables.items() if key != TABLE}
    return dict(flatten_keys(tables))


_COMMENT_COLUMN = 44  # column of text
_HEAD = "# Behind each # stands where a value comes from; all settings: echelon config show FILE\n"


def imported_toml(imported: Imported, folder: Path | None = None) -> str:
    """Return the run.toml of an imported run, to stand in `folder` (or where you are)."""
    head = (
        f"# Imported from {_comment(str(imported.path))} ({TOOLS[imported.kind].title}).\n{_HEAD}"
    )
    if imported.extends is not None:
        head += f"\nextends = {toml_text(_base(imported.extends, folder or Path()))}\n"
    resolved = {row.key: row.value for row in imported.job.sources}
    values: dict[str, str] = {}
    for key, setting in SETTINGS.items():
        if (entry := imported.settings.get(key)) is not None:
            # A relative path would be another one in another folder.
            value = resolved[key] if setting.path else toml_text(entry.value)
            width = max(0, _COMMENT_COLUMN - len(f"{key.rpartition('.')[2]} = "))
            source = _comment(entry.source.removeprefix(f"{imported.path}: "))
            values[key] = f"{value:<{width}}# {source}"
    return f"{head}\n{toml_tables(values)}"


def mapping_rows(imported: Imported) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, value, setting ("-" for none) and reason; a key is named once."""
    before = ""
    for row in imported.rows:
        setting = f"{row.setting} = {toml_text(row.value)}" if row.setting else "-"
        same = row.key == before
        yield ("" if same else row.key, "" if same else row.given, setting, row.why)
        before = row.key


def _comment(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _base(extends: str, folder: Path) -> str:
    """Return what a run builds on as it stands in a file of `folder`: a preset, or a path."""
    if read_extendable(extends) or Path(extends).is_absolute():
        return extends
    path = os.path.relpath(Path(extends).expanduser(), folder)
    return path if "/" in path else f"./{path}"
