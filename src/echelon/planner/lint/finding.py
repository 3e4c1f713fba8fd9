# SPDX-License-Identifier: Apache-2.0
"""What a lint is: an id, why it looks, where that is from, and a check of one Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, TypeAlias

from echelon.core.plan import Plan

Severity = Literal["memory", "time", "numbers"]
"""What is at stake: whether a run fits, how fast it is, or how exact."""


LintMatch: TypeAlias = tuple[str, str]
"""The numbers of one plan that a lint stumbled over, and what to do about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """Look at a plan for one thing that is legal, and seldom wanted."""

    id: str
    severity: Severity
    why: str
    source: str
    check: Callable[[Plan], LintMatch | None]


def lint_of(
    name: str, severity: Severity, source: str
) -> Callable[[Callable[[Plan], LintMatch | None]], Lint]:
    """Make a lint of a check, whose docstring says why it looks."""

    def make(check: Callable[[Plan], LintMatch | None]) -> Lint:
        why = " ".join((check.__doc__ or "").split())
        return Lint(id=name, severity=severity, why=why, source=source, check=check)

    return make


def lints_of(module: ModuleType) -> tuple[Lint, ...]:
    """Return the lints of a module, in the order in which they stand there."""
    return tuple(one for one in vars(module).values() if isinstance(one, Lint))


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """Hold what a lint found in a plan."""

    id: str
    severity: Severity
    message: str
    do: str
    source: str
