# SPDX-License-Identifier: Apache-2.0
"""All lints of a plan: checks of any legal plan for pitfalls, and whether it fits.

A lint refuses nothing: it says what it saw, with the numbers, and what would do. What cannot run at
all is a rule (`core/rulebook/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from textwrap import wrap

from echelon.core.plan import Plan
from echelon.core.units import gib
from echelon.cost.bytes.held import bytes_held
from echelon.planner.lint import memory, placement, speed
from echelon.planner.lint.finding import Lint, LintFinding, Severity, lints_of
from echelon.planner.lint.memory import DOES_NOT_FIT
from echelon.planner.predict.stage_rows import most_held_bytes, stage_rows

LINTS: tuple[Lint, ...] = tuple(chain(*map(lints_of, (placement, memory, speed))))
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


def plan_fits(plan: Plan) -> bool:
    """Return whether every rank's device has room for what it holds, activations included."""
    return not why_not_fit(plan)


def why_not_fit(plan: Plan) -> str:
    """Return the arithmetic of a plan that does not fit, and a remedy; "" if it fits."""
    room = plan.cluster.device.memory_bytes
    for finding in lint(plan):
        if finding.id == DOES_NOT_FIT:
            return f"{finding.id}: {finding.message} -> {finding.do}"
    held = max(most_held_bytes(plan, stage_rows(plan)), most_held_by_server(plan))
    if held <= room:
        return ""
    return (
        f"{DOES_NOT_FIT}: {gib(held)} GiB between steps on the fullest rank, its device has "
        f"{gib(room)} -> a higher ZeRO stage, more ranks, or offload"
    )


def most_held_by_server(plan: Plan) -> int:
    """Return what the server that holds most holds between steps; 0 where there is none."""
    ranks = plan.mesh.server_ranks
    return max((sum(term.bytes for term in bytes_held(plan, rank)) for rank in ranks), default=0)
