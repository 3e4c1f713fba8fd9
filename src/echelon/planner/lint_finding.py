"""What a lint is: an id, why it looks, where that is from, and a check of one Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from echelon.core.plan import Plan

Severity = Literal["memory", "time", "numbers"]
"""What is at stake: whether a run fits, how fast it is, or how exact."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Hold the numbers of one plan that a lint stumbled over, and what to do about them."""

    message: str
    do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """Look at a plan for one thing that is legal, and seldom wanted."""

    id: str
    severity: Severity
    why: str
    source: str
    check: Callable[[Plan], Fault | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Hold what a lint found in a plan."""

    id: str
    severity: Severity
    message: str
    do: str
    source: str
