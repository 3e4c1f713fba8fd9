# SPDX-License-Identifier: Apache-2.0
"""What `keys.toml` of a tool says: its keys that set nothing here, and settings it has no word for.

`sections` are the names of its tables. Below `keys` stand groups of keys that are read together,
each key with the reason why it needs no setting, or with one of

    { to = "mesh.tp", takes = "count" }   the setting that it is, and the kind of its value, or
    { to = "...", words = {...} }         each word that it takes, and what that is here
    { takes = "flag", why = "..." }       no setting, where its value is of this kind
    { only = [0], why = "..." }           the same, where its value is one of these
    { switch = "enabled", why = "..." }   a table that is refused where this key of it is true
    { refused = true, why = "..." }       refused, whatever its value is

and, where a refusal is about a setting, `setting`. Refused is what would change the mathematics of
a run; a key that only writes, shows or hurries something has its reason. Below `export` a reason
has the settings that it is about: those that stand elsewhere, that change speed and memory only, or
that are refused. `flags` are keys that are handed on to Megatron-LM, with its name for them, and
`vocab` the sizes of tokenizers that a file only names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """Say why a key needs no setting, and when it is refused."""

    why: str
    to: str = ""
    words: Mapping[str, object] | None = None
    takes: str = ""
    only: Sequence[object] | None = None
    switch: str = ""
    refused: bool = False
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTables:
    """Hold the tables of a tool: rules by group and key, reasons by setting or table of them."""

    sections: tuple[str, ...]
    keys: Mapping[str, Mapping[str, KeyRule]]
    flags: Mapping[str, str]
    """Keys of a tool that hands them on to another, and what they are called there."""
    vocab: Mapping[str, int]
    """Tokenizers that a file names without their size, and how many ids they have."""
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings, or tables of them, that the tool takes from a script or a launcher, and why."""
    speed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings that change speed and memory only, and why the tool has no word for them."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why other settings cannot be honoured."""


@cache
def tool_tables(tool: str) -> ToolTables:
    """Return the tables of a tool, by the name of its folder."""
    data = tomllib.loads((files("echelon.interop") / tool / "keys.toml").read_text("utf-8"))
    reasons = {
        part: {setting: why for why, settings in rows.items() for setting in settings}
        for part, rows in data.get("export", {}).items()
    }
    keys = {
        group: {
            key: KeyRule(why=rule) if isinstance(rule, str) else KeyRule(**rule)
            for key, rule in rows.items()
        }
        for group, rows in data["keys"].items()
    }
    return ToolTables(
        sections=tuple(data.get("sections", ())),
        keys=keys,
        flags=data.get("flags", {}),
        vocab=data.get("vocab", {}),
        **reasons,
    )
