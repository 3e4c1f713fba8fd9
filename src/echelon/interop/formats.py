# SPDX-License-Identifier: Apache-2.0
"""The files of a tool: how a plan becomes keys, and keys JSON, TOML, YAML or a command.

Settings for which a tool has no word are recorded for Echelon: as comments
`# echelon: table.key = value` where a file may hold comments, as a table "echelon" in a JSON
(DeepSpeed reads the keys that it knows). They stand below what the file says in the tool's words.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, isfinite, nextafter
from pathlib import Path
from typing import cast

from echelon.config.entries import Entry, flatten
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.serialize import decode_json
from echelon.core.settings.value_types import toml_text
from echelon.interop.key_reader import KeyOutcome, json_text
from echelon.interop.parsing import syntax_problem

PREFIX = "# echelon: "
TABLE, NOTES = "echelon", "notes"
WHY = "recorded by echelon export: the tool has no word for it, or takes it from elsewhere"


def nodes_and_ranks_per_node(plan: Plan) -> tuple[int, int]:
    """Return how many nodes a launcher starts, and how many ranks on each."""
    world = plan.mesh.world_size
    per_node = gcd(world, plan.cluster.devices_per_node) if world > 1 else 1
    return world // per_node, per_node


def factor_for_ratio(ratio: float, peak: float) -> float:
    """Return the number whose quotient by `peak` is `ratio`, to the last bit where there is one."""
    product = ratio * peak
    near = (product, nextafter(product, 0.0), nextafter(product, 2 * product + 1.0))
    return next((number for number in near if number / peak == ratio), product)


def without_none(keys: Mapping[str, object]) -> dict[str, object]:
    """Return the keys that are written: None stands for one that is left to the tool."""
    return {key: value for key, value in keys.items() if value is not None}


def as_json(
    keys: Mapping[str, object], header: Sequence[str], recorded: Mapping[str, object]
) -> str:
    """Return keys as a JSON object, with a table of Echelon's own in it."""
    return json.dumps(nest_keys(keys) | {TABLE: {NOTES: list(header), **recorded}}, indent=2) + "\n"


def as_toml(
    keys: Mapping[str, object], header: Sequence[str], recorded: Mapping[str, object]
) -> str:
    """Return keys as tables of TOML below comments."""
    lines = [*_comments(header, recorded)]
    for table, values in nest_keys(keys).items():
        lines += ["", f"[{table}]"]
        inner = cast("Mapping[str, object]", values)
        lines += [f"{name} = {_toml(value)}" for name, value in inner.items()]
    return "\n".join(lines) + "\n"


def as_yaml(
    keys: Mapping[str, object], header: Sequence[str], recorded: Mapping[str, object]
) -> str:
    """Return keys as YAML below comments; plain words and numbers need no library."""
    lines = [*_comments(header, recorded), *_yaml(nest_keys(keys), "")]
    return "\n".join(lines) + "\n"


def as_command(
    flags: Mapping[str, object],
    header: Sequence[str],
    recorded: Mapping[str, object],
    *,
    launcher: Sequence[str],
    script: str,
) -> str:
    """Return flags as a shell script: those of the launcher, the script, then all others."""
    words = {flag: _words(value) for flag, value in flags.items()}
    start = " ".join(["torchrun", *(" ".join((flag, *words[flag])) for flag in launcher), script])
    rest = [" ".join((flag, *given)) for flag, given in words.items() if flag not in launcher]
    command = " \\\n    ".join([start, *rest])
    return "\n".join(["#!/bin/sh", *_comments(header, recorded), command]) + "\n"


def nest_keys(keys: Mapping[str, object]) -> dict[str, object]:
    """Return flat keys with dots as tables in tables."""
    tables: dict[str, object] = {}
    for key, value in keys.items():
        *path, name = key.split(".")
        table = tables
        for part in path:
            table = cast("dict[str, object]", table.setdefault(part, {}))
        table[name] = value
    return tables


def _comments(header: Sequence[str], recorded: Mapping[str, object]) -> Iterator[str]:
    yield from (f"# {line}" for line in header)
    yield from recorded_lines(recorded)


def _words(value: object) -> list[str]:
    if value is True:
        return []
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    return [shlex.quote(str(item)) for item in items]


def _toml(value: object) -> str:
    if isinstance(value, float) and not isfinite(value):
        return "inf"
    return toml_text(value)


def _yaml(table: Mapping[str, object], indent: str) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _yaml(cast("dict[str, object]", value), f"{indent}  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRefusal:
    """Say of a setting why a tool cannot honour it, and which settings instead might do."""

    setting: str
    value: object
    why: str
    suggestions: tuple[Mapping[str, object], ...] = ()


def refusals(*rows: tuple[object, str, object, str, Iterable[object]]) -> Iterator[ExportRefusal]:
    """Yield a refusal for the first row of each setting whose condition holds.

    A row is a condition, a setting, its value, why it is refused, and other values that might do.
    """
    found: set[str] = set()
    for holds, setting, value, why, others in rows:
        if holds and setting not in found:
            found.add(setting)
            suggestions = tuple({setting: other} for other in others)
            yield ExportRefusal(setting=setting, value=value, why=why, suggestions=suggestions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWriter:
    """Describe how a plan is written in the words of a tool."""

    keys: Callable[[Plan, Mapping[str, object]], Mapping[str, object]]
    """The keys of a plan, and of the settings of the rest of its run."""
    render: Callable[[Mapping[str, object], Sequence[str], Mapping[str, object]], str]
    """The text of keys, below lines for the head of the file, with the settings to record."""
    unsupported: Callable[[Plan], Iterator[ExportRefusal]]
    """What the keys could say and the tool would refuse."""
    advice: Callable[[Plan], Iterator[str]]
    """Lines for the head of the file: how it is started, and what the user adds."""
    says_model: bool = False
    """Whether the keys say the whole model: then no preset is recorded beside them."""
