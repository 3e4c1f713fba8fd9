# SPDX-License-Identifier: Apache-2.0
"""A race: memory that one rank used when it was not its to use, and where in the code."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import PurePath


class RaceKind(StrEnum):
    """Name what was done too early, or never."""

    NEVER_AWAITED = "never awaited"
    USED = "used before it was awaited"
    CHANGED = "changed in flight"
    FREED = "freed in flight"
    USED_FREED = "used after it was freed"
    FREED_TWICE = "freed twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Say what one rank did with memory that was not its to use.

    `at` is where in the code, `when_s` the time of a clock that the ranks of a machine share.
    """

    kind: RaceKind
    operation: str
    axis: str
    step: int
    rank: int
    at: str
    says: str
    when_s: float

    def to_json(self) -> str:
        """Return the race as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Race:
        """Return the race of a line that `to_json` made."""
        table = json.loads(line)
        return cls(**{**table, "kind": RaceKind(table["kind"])})


def place_in_code() -> str:
    """Return the two innermost places in the code that are neither torch's nor part of this."""
    frame, found = sys._getframe(1), list[str]()
    while frame is not None and len(found) < _NUM_PLACES:
        file = _file_told(frame.f_code.co_filename)
        if file:
            found.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return ", called at ".join(found)


_NUM_PLACES = 2
"""A kernel says little without who called it."""

_OWN = (("echelon", "parallel", "completion"), ("echelon", "parallel", "transport"))
"""Folders whose frames say nothing about who uses a tensor."""

_PLUMBING = frozenset({"buffers", "contextlib", "tensor_memory"})
"""Modules of which the same holds."""


@cache
def _file_told(path: str) -> str:
    """Return a file as it is told, or nothing where it is not."""
    parts = PurePath(path).parts
    if (
        not path.endswith(".py")
        or parts[-4:-1] in _OWN
        or "site-packages" in parts
        or PurePath(path).stem in _PLUMBING
    ):
        return ""
    return "/".join(parts[-3:])
