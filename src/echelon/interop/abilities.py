# SPDX-License-Identifier: Apache-2.0
"""What a tool is: what it can run, what it calls our choices, and what its `keys.toml` says.

A search for a tool keeps to what it can run. What its writer refuses is left out
(`tests/planner/search/test_tool_limits.py` exports every plan of a search), and what its
documentation rules out although there are words for it.

In `keys.toml`, `sections` are the names of its tables. Below `keys` stand groups of keys that are
read together, each key with the reason why it needs no setting, or with one of

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TypeAlias

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.schedule.build import schedules_of_tool

_ZeroRule: TypeAlias = Callable[..., bool]
"""Whether a tool runs a ZeRO stage: (stage, *, dp_replicate, dp_shard, pp, cp, tp)."""
_ScheduleRule: TypeAlias = Callable[..., bool]
"""Whether a tool runs a schedule on pp ranks: (name, *, pp, microbatches)."""
_StageRule: TypeAlias = Callable[..., bool]
"""Whether a tool cuts blocks into so many stages: (*, layers, stages)."""


def _allow_all(*_: object, **__: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAbilities:
    """Say what a tool can run; None where it can run all that there is."""

    schedules: tuple[str, ...] | None = None
    """Pipeline schedules, by our names, in the order in which they are tried."""
    virtual_stages: tuple[int, ...] | None = None
    """Stages on a pipeline rank."""
    context_kinds: tuple[str, ...] | None = None
    """Ways to cut a sequence, by our names."""
    recompute_every: tuple[int, ...] | None = None
    """Every how many blocks one is recomputed; 0 is none."""
    degrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Degrees of axes that it has not, or not as large as it likes, by the name of the axis."""
    zero_stages: tuple[int, ...] | None = None
    """Stages of ZeRO."""
    offload: bool = True
    """Whether optimizer state can rest in host memory."""
    sequence_parallel: bool | None = None
    """Whether tensor ranks cut norms and residuals too; None where either may be."""
    sequence_parallel_with_experts: bool | None = None
    """The same for a model with experts."""
    allows_zero: _ZeroRule = _allow_all
    """Which stages go with which meshes."""
    allows_schedule: _ScheduleRule = _allow_all
    """Which schedules go with which numbers of microbatches."""
    allows_stages: _StageRule = _allow_all
    """Into how many stages, of all ranks, so many blocks can be cut."""
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings that it has no choice of, where nobody says any."""
    reduces_in_parameter_dtype: bool = False
    """Whether gradients are summed over ranks in the dtype of parameters."""


def _allows_whole_rounds(_: str, *, pp: int, microbatches: int) -> bool:
    return microbatches % pp == 0


def _allows_equal_stages(*, layers: int, stages: int) -> bool:
    return layers % stages == 0


WITHOUT_FILES: Mapping[str, ToolAbilities] = {
    "jax": ToolAbilities(
        schedules=("gpipe", "breadth-first"),
        allows_schedule=_allows_whole_rounds,
        allows_stages=_allows_equal_stages,
    )
}
"""What trainers can run with which no files are exchanged.

MaxText loops over microbatches forward, and what XLA derives of that is the whole backward; a rank
may have several equal stages (MaxText/layers/pipeline.py @00ab5ea)."""


@dataclass(frozen=True, slots=True)
class ToolNames:
    """Look up the words of a tool by our names; what is not named has no word in its file."""

    tool: str
    """The name that records have for it, which is that of its folder."""

    @property
    def schedules(self) -> dict[str, str]:
        """Return its words by what `pipeline.schedule` takes."""
        return by_word(schedules_of_tool(self.tool))

    @property
    def context_kinds(self) -> dict[str, str]:
        """Return its words by what `context.kind` takes."""
        return by_word(CONTEXT_KINDS.of_tool(self.tool))

    @property
    def optimizers(self) -> dict[str, str]:
        """Return its words by what `optimizer.kind` takes."""
        return by_word(OPTIMIZERS.of_tool(self.tool))


def by_word(names: Mapping[str, str]) -> dict[str, str]:
    """Return our names by the words of a tool."""
    return {word: name for name, word in names.items()}


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
