# SPDX-License-Identifier: Apache-2.0
"""Gather the layers of a run: presets, the chain of `extends`, the run file, the --set flags."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.config.entries import Entries, Entry, check_layer, flatten, merge
from echelon.config.presets import (
    Preset,
    extendable_names,
    preset_names,
    read_extendable,
    read_preset,
)
from echelon.config.reading import is_file, is_folder, line_of, read_toml
from echelon.config.schema import SETTINGS
from echelon.core.errors import Problem
from echelon.core.messages.names import names_within
from echelon.core.rulebook.config import (
    CONFLICTING_SETTINGS,
    EXTENDS_CYCLE,
    SET_SYNTAX,
    UNKNOWN_KEY,
    UNKNOWN_PRESET,
)
from echelon.core.rules import did_you_mean
from echelon.core.settings.value_types import Setting, Text

LOG = logging.getLogger(__name__)
RUN_SOURCES = ("a run.toml", "a preset (echelon config presets)")
"""What a run may be named by, where no name is near to what was typed."""
TABLES_OF_FACTS = ("model", "cluster")
"""Tables of which no value of a preset gives way to the user's."""
CLUSTER_KEY = "devices_per_node"
"""What every cluster file has, and no run file."""


@dataclass(slots=True)
class SettingLayers:
    """Collect layers, lowest first, and every problem met on the way.

    It is incomplete where a file or preset could not be read: then nothing is said to be missing.
    """

    layers: list[Entries] = field(default_factory=list[Entries])
    problems: list[Problem] = field(default_factory=list[Problem])
    incomplete: bool = False

    def add(self, layer: Entries) -> None:
        """Check a layer and keep what fits."""
        fitting, problems = check_layer(layer)
        self.layers.append(fitting)
        self.problems.extend(problems)

    def add_problem(self, problem: Problem) -> None:
        """Note that a layer could not be read."""
        self.problems.append(problem)
        self.incomplete = True

    def merged(self) -> dict[str, Entry]:
        """Return the entries of all layers, the last winning."""
        return merge(self.layers)


def gather_layers(
    source: Path | str, sets: Sequence[str], typed: Mapping[str, Entry] | None = None
) -> SettingLayers:
    """Return the layers of a run file or preset, with --set and what else was typed on top."""
    gathered = SettingLayers()
    _add_source(gathered, source, folder=Path(), set_by="", chain=())
    layer, problems = parse_set_flags(sets, typed)
    gathered.problems.extend(problems)
    gathered.add(layer)
    return gathered


def entries_from_tables(
    tables: Mapping[str, object],
    lines: Mapping[str, int],
    path: Path,
    settings: Mapping[str, Setting] = SETTINGS,
) -> dict[str, Entry]:
    """Return the entries of a TOML file, each with its line."""
    return {
        key: Entry(value=value, source=_place(path, line_of(key, lines)), folder=path.parent)
        for key, value in flatten(tables, settings=settings)
    }


def preset_entries(preset: Preset) -> dict[str, Entry]:
    """Return the entries of a preset."""
    source = f"preset {preset.name}"
    entries = {
        key: Entry(
            value=value, source=source, gives_way=key.partition(".")[0] not in TABLES_OF_FACTS
        )
        for key, value in flatten(preset.tables)
    }
    if preset.kind == "models":
        entries["model.preset"] = Entry(value=preset.name, source=source)
    return entries


def _assignments(key: str) -> tuple[str, ...]:
    """Return flags with a value for a key without one."""
    meant = (key,) if key in SETTINGS else did_you_mean(key, SETTINGS)
    found = [f"--set {one}={value}" for one in meant for value in SETTINGS[one].examples()]
    return tuple(found) or ("--set mesh.tp=2",)


def parse_set_flags(
    sets: Sequence[str], typed: Mapping[str, Entry] | None = None
) -> tuple[Entries, list[Problem]]:
    """Return the entries of --set flags, and a problem for each that is not KEY=VALUE.

    `typed` are settings that were given in another way, such as --cluster: the flags join them.
    """
    entries: dict[str, Entry] = dict(typed or {})
    problems: list[Problem] = []
    for text in sets:
        key, equals, value = text.partition("=")
        key, source = key.strip(), f"--set {text}"
        if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key):
            problems.append(
                SET_SYNTAX.problem(
                    f"--set {text!r} is not table.key=value",
                    set_by=source,
                    suggestions=_assignments(key),
                )
            )
            continue
        if key == "extends":
            problems.append(
                SET_SYNTAX.problem(
                    "extends stands in a run file, not after --set",
                    set_by=source,
                    suggestions=(f"echelon init --extends {value.strip()} --out run.toml",),
                )
            )
            continue
        for name, item in flatten({key: _set_value(key, value.strip())}):
            entry = Entry(value=item, source=source, folder=Path())
            before = entries.setdefault(name, entry)
            if before is not entry and before.value != item:
                problems.append(
                    CONFLICTING_SETTINGS.problem(
                        f"{name} is set twice, to different values",
                        key=name,
                        set_by=f"{before.source}, {source}",
                    )
                )
    return entries, problems


def _set_value(key: str, text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"] if len(parsed) == 1 else text
    setting = SETTINGS.get(key)
    # A run named 2024-11-21, or a folder named 7, needs no quotes.
    if setting is not None and isinstance(setting.kind, Text) and not isinstance(value, str):
        return text
    return value


def _add_source(
    gathered: SettingLayers,
    source: Path | str,
    *,
    folder: Path,
    set_by: str,
    chain: tuple[str, ...],
) -> None:
    path = Entry(value=str(source), source="", folder=folder).path()
    if isinstance(source, str) and (preset := preset_meant(source, path)):
        LOG.debug(f"read the preset {preset.name}")
        gathered.add(preset_entries(preset))
    elif isinstance(source, str) and not is_file(path) and _may_be_preset(source, path):
        gathered.add_problem(_unknown_preset(str(source), folder, set_by))
    else:
        _add_file(gathered, path, set_by=set_by, chain=chain)


def preset_meant(source: str, path: Path) -> Preset | None:
    """Return the run or model preset that a name means, where nothing else has this name.

    What lies at `path` wins over another spelling of a preset, not over the preset's own name.
    """
    own = source in extendable_names()
    if source.endswith(".toml") or not (own or not (is_file(path) or is_folder(path))):
        return None
    return read_extendable(source)


def _may_be_preset(source: str, path: Path) -> bool:
    """Return whether a name that is no file may be meant for a preset: org/Model is written so."""
    return not source.endswith(".toml") and ("/" not in source or not is_folder(path))


def _add_file(gathered: SettingLayers, path: Path, *, set_by: str, chain: tuple[str, ...]) -> None:
    read = read_toml(path, set_by)
    if isinstance(read, Problem):
        gathered.add_problem(read)
        return
    if CLUSTER_KEY in read[0]:
        gathered.add_problem(_is_cluster(path, set_by))
        return
    LOG.debug(f"read {path}")
    here = str(path.resolve())
    if here in chain:
        files = " -> ".join(Path(file).name for file in (*chain[chain.index(here) :], here))
        gathered.add_problem(
            EXTENDS_CYCLE.problem(
                f"{files}: a file builds on itself",
                key="extends",
                set_by=set_by,
                suggestions=('extends = "nano"', "no extends"),
            )
        )
        return
    entries = entries_from_tables(*read, path)
    base = entries.pop("extends", None)
    if base is not None:
        layer, problems = check_layer({"extends": base})
        gathered.problems.extend(problems)
        gathered.incomplete = gathered.incomplete or bool(problems)
        if layer:
            _add_source(
                gathered,
                str(base.value),
                folder=path.parent,
                set_by=base.source,
                chain=(*chain, here),
            )
    gathered.add(entries)


def _is_cluster(path: Path, set_by: str) -> Problem:
    return UNKNOWN_KEY.problem(
        f"{path} describes a cluster ({CLUSTER_KEY}), not a run",
        set_by=set_by or str(path),
        suggestions=(f"--set cluster.file={path}", f"echelon plan MODEL --cluster {path}"),
    )


def _unknown_preset(name: str, folder: Path, set_by: str) -> Problem:
    close = _nearest(name, extendable_names())
    hint = f'; did you mean "{close[0]}"?' if close else ""
    inner = folder / name
    around = inner if is_folder(inner) else folder
    files = sorted(str(path) for path in around.glob("*.toml") if _is_run_file(path))
    return UNKNOWN_PRESET.problem(
        f'"{name}" is neither a file nor a preset{hint}',
        key="extends" if set_by else "",
        set_by=set_by,
        suggestions=(*(close or RUN_SOURCES), *files[:8]),
    )


def _nearest(name: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names that begin as one does, or are nearest to it, with or without its maker."""
    own = name.rpartition("/")[2]
    return names_within(own, known) or did_you_mean(name, known) or did_you_mean(own, known)


def _is_run_file(path: Path) -> bool:
    """Return whether a TOML file has a table of a run, or says what it builds on."""
    read = read_toml(path, "")
    tables = {setting.table for setting in SETTINGS.values()} | {"extends"}
    return not isinstance(read, Problem) and not tables.isdisjoint(read[0])


def model_preset_problem(entry: Entry) -> Problem | None:
    """Return the problem of a `model.preset` that names nothing."""
    name = str(entry.value)
    if read_preset("models", name):
        return None
    names = preset_names("models")
    close = _nearest(name, names)
    hint = f'; did you mean "{close[0]}"?' if close else ""
    return UNKNOWN_PRESET.problem(
        f'model.preset = "{name}" is not a model{hint}',
        key="model.preset",
        set_by=entry.source,
        suggestions=close or names,
    )


def _place(path: Path, line: int | None) -> str:
    return f"{path}:{line}" if line is not None else str(path)
