# SPDX-License-Identifier: Apache-2.0
"""Every error that Echelon raises on purpose.

    EchelonError                 one or more problems, each with a rule id
    |-- ConfigError              the run file, a flag or a preset is wrong            exit 2
    |   `-- InfeasiblePlan       each value is legal, together they cannot run        exit 2
    |-- DataError                a data file is missing, damaged or does not fit      exit 2
    |-- CheckpointError          a checkpoint is missing, damaged or does not fit     exit 2
    |-- EnvironmentProblem       the machine lacks something                          exit 3
    |-- ProofFailed              the plan was run and is not equal to one device      exit 1
    `-- RunFailed                training started and could not go on                 exit 4
        `-- Interrupted          ranks were asked to stop, and nothing is kept        exit 130

An error carries *all* problems that were found, not the first one. `assert` is for our own bugs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


def either(ways: Sequence[str]) -> str:
    """Return several ways as a choice: ``1, 2 or 4``."""
    *others, last = ways
    return f"{', '.join(others)} or {last}" if others else last


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """State one thing that is wrong: the rule, the arithmetic, where it was set, what works."""

    rule: str
    message: str
    key: str = ""
    set_by: str = ""
    suggestions: tuple[str, ...] = ()

    def render(self) -> str:
        """Return the problem as the two or three lines that a user reads."""
        lines = [f"error[{self.rule}]: {self.message}"]
        hints: list[str] = []
        if self.set_by:
            hints.append(f"set by: {self.set_by}")
        if self.suggestions:
            hints.append(f"works here: {either(self.suggestions)}")
        hints.append(f"more: echelon explain {self.rule}")
        lines.append("  " + "      ".join(hints))
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the problem as a JSON object."""
        return {
            "rule": self.rule,
            "message": self.message,
            "key": self.key,
            "set_by": self.set_by,
            "works": list(self.suggestions),
        }


class EchelonError(Exception):
    """The base of every error that is the user's to mend; carries all problems at once."""

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        """Keep `problems` (one or several) in the order in which they were found."""
        self.problems: Sequence[Problem] = (
            (problems,) if isinstance(problems, Problem) else tuple(problems)
        )
        assert self.problems, "an error without a problem says nothing"
        super().__init__("\n".join(problem.render() for problem in self.problems))

    def __reduce__(self) -> tuple[type[EchelonError], tuple[Sequence[Problem]]]:
        """Let the error cross a process boundary with its problems."""
        return type(self), (self.problems,)

    def with_problems(self, problems: Iterable[Problem]) -> Self:
        """Return the error with other words for its problems."""
        return type(self)(problems)

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the rule ids, in order."""
        return tuple(problem.rule for problem in self.problems)


class ConfigError(EchelonError):
    """The run file, a flag or a preset is wrong."""


class InfeasiblePlan(ConfigError):
    """Each value is legal by itself; together they cannot run."""


class DataError(EchelonError):
    """A data file is missing, damaged, or does not fit the model."""


class CheckpointError(EchelonError):
    """A checkpoint is missing, damaged, or does not fit the run."""


class EnvironmentProblem(EchelonError):
    """The machine lacks something that the command needs."""

    exit_code = 3


class ProofFailed(EchelonError):
    """The plan was run and is not equal to one device."""

    exit_code = 1


class RunFailed(EchelonError):
    """Training started and could not go on."""

    exit_code = 4


class Interrupted(RunFailed):
    """Ranks were asked to stop, and nothing of their work is kept."""

    exit_code = 130


EXIT_STOPPED_WITH_CHECKPOINT = 75  # EX_TEMPFAIL of sysexits.h
