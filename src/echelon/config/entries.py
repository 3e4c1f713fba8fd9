# SPDX-License-Identifier: Apache-2.0
"""Settings as they were written: value and place of each, layer over layer.

A *layer* is one file, one preset, or all --set flags together. Each layer is checked by itself
against the schema, so a mistake is reported even where a later layer overrides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from echelon.config.schema import CLUSTER_SOURCES, MODEL_SOURCES, SETTINGS, tables
from echelon.core.errors import Problem
from echelon.core.messages.names import SYNONYMS
from echelon.core.messages.removed_settings import REMOVED_SETTINGS, RemovedSetting
from echelon.core.rulebook.config import (
    CONFLICTING_SETTINGS,
    REMOVED_SETTING,
    UNKNOWN_KEY,
    WRONG_TYPE,
)
from echelon.core.rules import did_you_mean
from echelon.core.settings.value_types import Quantity, Setting, toml_text

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Hold a value, and where it was set; a path in it is relative to `folder`."""

    value: object
    source: str
    folder: Path | None = None
    gives_way: bool = False
    """True for a run preset's value, which adapts to what the user wrote."""

    def path(self) -> Path:
        """Return the value as a path, taken from the folder of the file that sets it."""
        path = Path(str(self.value))
        # The home of a user who does not exist: the file is then missed under the name as written.
        with suppress(RuntimeError):
            path = path.expanduser()
        return (self.folder or Path()) / path


Entries = Mapping[str, Entry]
"""What one layer sets, by dotted key."""


def flatten(
    table: Mapping[str, object], prefix: str = "", settings: Mapping[str, Setting] = SETTINGS
) -> Iterator[tuple[str, object]]:
    """Yield the dotted key and value of every setting in nested tables.

    A table is entered unless its name is that of a setting; an empty one of the schema is fine.
    """
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in settings:
            inner = cast("dict[str, object]", value)
            yield from flatten(inner, f"{key}.", settings)
            if not inner and key not in tables(settings):
                yield key, inner
        else:
            yield key, value


def check_layer(
    layer: Entries, settings: Mapping[str, Setting] = SETTINGS
) -> tuple[Entries, list[Problem]]:
    """Return the entries of a layer that fit the schema, and a problem for each that does not."""
    known_tables = tables(settings)
    fitting: dict[str, Entry] = {}
    problems: list[Problem] = []
    unknown_tables: set[str] = set()
    for key, entry in layer.items():
        setting = settings.get(key)
        if removed := REMOVED_SETTINGS.get(key):
            problems.extend(_removed(removed, entry))
        elif setting is None:
            table = key.rpartition(".")[0]
            if table not in unknown_tables:
                problems.append(_unknown(key, entry, settings))
            if table and table not in known_tables:
                unknown_tables.add(table)
        elif problem := _misfit(setting, entry):
            problems.append(problem)
        elif isinstance(setting.kind, Quantity):
            fitting[key] = replace(entry, value=setting.kind.read(entry.value))
        else:
            fitting[key] = entry
    problems.extend(_conflicts(layer))
    return fitting, problems


def merge(layers: list[Entries]) -> dict[str, Entry]:
    """Return the settings of all layers; a later one overrides an earlier.

    A layer that names a model (or a cluster) replaces the whole model (cluster) of those before.
    """
    merged: dict[str, Entry] = {}
    for entries in layers:
        for sources in (MODEL_SOURCES, CLUSTER_SOURCES):
            if any(source in entries for source in sources):
                table = sources[0].partition(".")[0]
                merged = {k: e for k, e in merged.items() if k.partition(".")[0] != table}
        merged.update(entries)
    return merged


def _misfit(setting: Setting, entry: Entry) -> Problem | None:
    invalid = setting.kind.check(entry.value)
    if invalid is None:
        return None
    return invalid.rule.problem(
        f"{setting.key} = {toml_text(entry.value)} {invalid.message}",
        key=setting.key,
        set_by=entry.source,
        suggestions=invalid.suggestions or setting.examples(),
    )


def _conflicts(entries: Entries) -> Iterator[Problem]:
    for sources in (MODEL_SOURCES, CLUSTER_SOURCES):
        found = [source for source in sources if source in entries]
        if len(found) > 1:
            table = sources[0].partition(".")[0]
            yield CONFLICTING_SETTINGS.problem(
                f"{' and '.join(found)} each name a whole {table}; keep one",
                key=found[1],
                set_by=", ".join(entries[source].source for source in found),
                suggestions=found,
            )


def _unknown(key: str, entry: Entry, settings: Mapping[str, Setting]) -> Problem:
    table, _, name = key.rpartition(".")
    if key in tables(settings):
        return WRONG_TYPE.problem(
            f"{key} = {toml_text(entry.value)} is not a table; its keys stand under [{key}]",
            key=key,
            set_by=entry.source,
        )
    siblings = [known for known in settings if known.rpartition(".")[0] == table]
    meant = _meant(table, name, siblings, settings)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    if table in tables(settings):
        what = f"[{table}] has no key {name}"
    else:
        what = f"there is no table [{table}]" if table else f"there is no key {name} outside tables"
    suggestions = meant or siblings or [f"[{known}]" for known in tables(settings)]
    return UNKNOWN_KEY.problem(
        f"{what}{hint}", key=key, set_by=entry.source, suggestions=suggestions
    )


def _removed(removed: RemovedSetting, entry: Entry) -> Iterator[Problem]:
    """Yield the problem of a setting that is gone, where a run uses it."""
    if entry.value != removed.unused:
        yield REMOVED_SETTING.problem(
            f"{removed.key} = {toml_text(entry.value)} was removed: {removed.message}",
            key=removed.key,
            set_by=entry.source,
            suggestions=removed.instead,
        )


def _meant(
    table: str, name: str, siblings: list[str], settings: Mapping[str, Setting]
) -> list[str]:
    prefix = f"{table}." if table else ""
    names = [known.rpartition(".")[2] for known in siblings]
    if close := did_you_mean(name, names):
        return [f"{prefix}{word}" for word in close]
    lower = name.lower()
    for word in (lower, *SYNONYMS.get(lower, ())):
        if elsewhere := [known for known in settings if known.rpartition(".")[2] == word]:
            near = did_you_mean(f"{prefix}{word}", elsewhere)
            return list(near) or elsewhere
    return list(did_you_mean(f"{prefix}{name}", settings))
