# SPDX-License-Identifier: Apache-2.0
"""The forms of files: flat keys with dots as JSON, TOML, YAML, or the flags of a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, isfinite, nextafter
from typing import cast

from echelon.config.settings.value_types import toml_text
from echelon.core.plan import Plan
from echelon.interop.echelon_keys import NOTES, TABLE, recorded_lines


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
