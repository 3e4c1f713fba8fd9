# SPDX-License-Identifier: Apache-2.0
"""An action, and a schedule: the list of actions that each pipeline rank runs from left to right.

A schedule is complete as it stands: stages may outnumber ranks, a rank may own several stages
(interleaved or V-shaped placement), the backward pass may be fused (BW) or split (B and W), and
some microbatches may cross the ranks the other way round (DualPipe), where copies of the stages
are.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar, cast

from echelon.core.serialize import decode_json

T = TypeVar("T")

SCHEDULE_SCHEMA = 2  # of the written file

_ACTION = re.compile(r"(F|BW|B|W)(\d+)\.(\d+)", re.ASCII)


class ActionKind(StrEnum):
    """Name what an action computes for one microbatch on one stage."""

    F = "F"
    """The forward pass."""
    B = "B"
    """The gradient of the stage's input alone; the weight gradients are left for W."""
    W = "W"
    """The weight gradients that B left."""
    BW = "BW"
    """The whole backward pass at once."""


@dataclass(frozen=True, slots=True)
class Action:
    """Say what is computed, on which stage, for which microbatch; ``F0.3`` in text."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Return the short form: ``F0.3`` is the forward pass of microbatch 3 on stage 0."""
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that `str` wrote; ValueError where it is not one."""
        found = _ACTION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not an action such as F0.3 (kind, stage, microbatch)")
        return cls(ActionKind(found[1]), int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Hold, for each pipeline rank, the actions of one step in the order in which it runs them.

    `stage_ranks[s]` is the rank that owns stage `s`. `mirrored` microbatches run on copies of the
    stages that lie the other way round: stage `s` on rank `num_ranks - 1 - stage_ranks[s]`.
    Nothing is checked here: `check_schedule` proves a schedule, whoever wrote it.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    mirrored: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stage_ranks)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank on which `microbatch` crosses `stage`."""
        rank = self.stage_ranks[stage]
        return self.num_ranks - 1 - rank if microbatch in self.mirrored else rank

    def owners_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold `stage`: one, or two where some microbatches are mirrored."""
        rank = self.stage_ranks[stage]
        return tuple(dict.fromkeys((rank, self.num_ranks - 1 - rank))) if self.mirrored else (rank,)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in rising order."""
        return tuple(s for s in range(self.num_stages) if rank in self.owners_of(s))

    def to_json(self) -> str:
        """Return the schedule as readable JSON, one line of actions per rank."""
        rows = [json.dumps(" ".join(str(action) for action in row)) for row in self.actions]
        head = json.dumps(
            {
                "schema": SCHEDULE_SCHEMA,
                "name": self.name,
                "num_ranks": self.num_ranks,
                "num_microbatches": self.num_microbatches,
                "stage_ranks": list(self.stage_ranks),
                "mirrored": list(self.mirrored),
            }
        )
        return head[:-1] + ', "actions": [\n  ' + ",\n  ".join(rows) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return the schedule that `to_json` wrote; ValueError names what does not fit."""
        data: Any = decode_json(text)
        if not isinstance(data, dict):
            raise ValueError("a schedule is a JSON object")
        entries = cast("dict[str, Any]", data)
        known = {"schema", *(entry.name for entry in fields(cls))}
        if set(entries) != known:
            raise ValueError(f"a schedule has the entries {sorted(known)}, not {sorted(entries)}")
        if entries["schema"] != SCHEDULE_SCHEMA:
            found = entries["schema"]
            raise ValueError(f"schedule schema {found!r}; this version reads {SCHEDULE_SCHEMA}")
        return cls(
            name=_text(entries["name"], "name"),
            num_ranks=_count(entries["num_ranks"], "num_ranks"),
            num_microbatches=_count(entries["num_microbatches"], "num_microbatches"),
            stage_ranks=tuple(
                _count(rank, "stage_ranks") for rank in _list(entries["stage_ranks"], "stage_ranks")
            ),
            mirrored=tuple(
                _count(one, "mirrored") for one in _list(entries["mirrored"], "mirrored")
            ),
            actions=tuple(
                tuple(Action.parse(word) for word in _text(row, "actions").split())
                for row in _list(entries["actions"], "actions")
            ),
        )


def _entry(value: Any, kind: type[T], words: str, where: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: expected {words}, found {value!r}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    return cast("list[Any]", _entry(value, list, "a list", where))


def _text(value: Any, where: str) -> str:
    return _entry(value, str, "text", where)


def _count(value: Any, where: str) -> int:
    return _entry(value, int, "a whole number", where)
