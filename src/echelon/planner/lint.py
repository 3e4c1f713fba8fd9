"""Look at any legal plan for what is seldom wanted: best practices and pitfalls, as checks.

A lint refuses nothing: it says what it saw, with the numbers, and what would do. What cannot run at
all is a rule (`core/rulebook/`).
"""

from __future__ import annotations

from textwrap import wrap

from echelon.core.plan import Plan
from echelon.planner.lint_compute import COMPUTE
from echelon.planner.lint_finding import Finding, Lint
from echelon.planner.lint_memory import MEMORY
from echelon.planner.lint_pipeline import PIPELINE
from echelon.planner.lint_place import PLACE
from echelon.planner.lint_traffic import TRAFFIC

LINTS: tuple[Lint, ...] = (*PLACE, *PIPELINE, *MEMORY, *COMPUTE, *TRAFFIC)
"""All lints, in the order in which findings are told."""

ROW_WIDTH = 80


def lint(plan: Plan) -> tuple[Finding, ...]:
    """Return what the lints find in a plan."""
    found = ((each, each.check(plan)) for each in LINTS)
    return tuple(
        Finding(
            id=each.id,
            severity=each.severity,
            message=fault.message,
            do=fault.do,
            source=each.source,
        )
        for each, fault in found
        if fault is not None
    )


def lint_rows(plan: Plan, width: int = ROW_WIDTH) -> list[str]:
    """Return a finding as lines of at most `width` characters, what to do behind the arrow."""
    return [line for finding in lint(plan) for line in _lines(finding, width)]


def _lines(finding: Finding, width: int) -> list[str]:
    return wrap(
        f"{finding.id}: {finding.message} -> {finding.do}",
        width,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
        break_long_words=False,
    )
