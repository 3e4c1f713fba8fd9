"""`echelon explain lints`: what the lints look for; with a run, what they find in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.cli.wrapped import wrapped
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.planner.lint import LINTS, lint, lint_rows
from echelon.planner.lint_finding import Lint


@dataclass(frozen=True, slots=True, kw_only=True)
class LintQuestion:
    """Hold the run that was asked about; None for the list of lints."""

    plan: Plan | None


def ask_lints(run: str | None, settings: Sequence[str]) -> LintQuestion:
    """Return the question; ConfigError where the run is wrong, or settings have none."""
    if run is None and settings:
        raise ConfigError(
            BAD_ARGUMENT.problem(
                "--set has an effect where a run is named",
                set_by="the command line",
                works=(f"echelon explain lints nano --set {' --set '.join(settings)}",),
            )
        )
    return LintQuestion(plan=None if run is None else load_job(run, settings).plan)


def lints_json(question: LintQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    found = {"lints": [lint_json(each) for each in LINTS]}
    if question.plan is None:
        return found
    return found | {"findings": [asdict(finding) for finding in lint(question.plan)]}


def lints_text(question: LintQuestion) -> str:
    """Return the page that a person reads."""
    if question.plan is None:
        lines = [
            line
            for each in LINTS
            for line in wrapped(f"{each.id} ({each.severity}): {each.why}", "", "    ")
        ]
    else:
        lines = lint_rows(question.plan) or [f"{len(LINTS)} lints found nothing."]
    return "\n".join(lines) + "\n"


def lint_json(each: Lint) -> dict[str, str]:
    """Return a lint as JSON values."""
    return {"id": each.id, "severity": each.severity, "why": each.why, "source": each.source}


def lint_page(each: Lint) -> str:
    """Return the page of one lint."""
    parts = (each.why, f"At stake: {each.severity}. Source: {each.source}.")
    text = "\n\n".join("\n".join(wrapped(part, "", "")) for part in parts)
    return f"{each.id}\n\n{text}\n\nA lint refuses nothing: echelon explain lints RUN\n"
