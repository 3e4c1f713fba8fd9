# SPDX-License-Identifier: Apache-2.0
"""Look at any legal plan for what is seldom wanted: best practices and pitfalls, as checks.

A lint refuses nothing: it says what it saw, with the numbers, and what would do. What cannot run at
all is a rule (`core/rulebook/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from echelon.core.plan import Plan
from echelon.planner.lint.compute import COMPUTE
from echelon.planner.lint.finding import Lint, LintFinding, Severity
from echelon.planner.lint.memory import MEMORY
from echelon.planner.lint.pipeline import PIPELINE
from echelon.planner.lint.placement import PLACE
from echelon.planner.lint.traffic import TRAFFIC

LINTS: tuple[Lint, ...] = (*PLACE, *PIPELINE, *MEMORY, *COMPUTE, *TRAFFIC)
"""All lints, in the order in which findings are told."""

_ROW_WIDTH = 80  # columns of text
WEIGHT: tuple[Severity, ...] = ("memory", "numbers", "time")
"""What weighs most, first: whether a run fits, then how exact it is, then how fast."""


def lint(plan: Plan) -> tuple[LintFinding, ...]:
    """Return what the lints find in a plan."""
    found = ((each, each.check(plan)) for each in LINTS)
    return tuple(
        LintFinding(
            id=each.id, severity=each.severity, message=fault[0], do=fault[1], source=each.source
        )
        for each, fault in found
        if fault is not None
    )


def lint_rows(
    plan: Plan, width: int = _ROW_WIDTH, *, most: int | None = None, without: Sequence[str] = ()
) -> list[str]:
    """Return findings as lines of at most `width` characters, what to do behind the arrow.

    With `most`, only so many, those that weigh most first, and how many more there are; without
    the ids of `without`.
    """
    found = [finding for finding in lint(plan) if finding.id not in without]
    if most is None or len(found) <= most:
        return [line for finding in found for line in _lines(finding, width)]
    kept = sorted(found, key=lambda finding: WEIGHT.index(finding.severity))[:most]
    rows = [line for finding in kept for line in _lines(finding, width)]
    more = ", ".join(finding.id for finding in found if finding not in kept)
    text = f"and {len(found) - most} more: {more}"
    return [*rows, *wrap(text, width, initial_indent="  ", subsequent_indent="      ")]


def _lines(finding: LintFinding, width: int) -> list[str]:
    return wrap(
        f"{finding.id}: {finding.message} -> {finding.do}",
        width,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
        break_long_words=False,
    )
