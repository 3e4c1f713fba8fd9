"""Run a command as users do, and apply what its error suggests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from echelon.cli import app
from echelon.cli.main import main
from echelon.config.schema import SETTINGS
from echelon.core.errors import EchelonError, Problem

STARTED = -1
"""The code of a command that has begun to start ranks: nothing is wrong with what was typed."""


class RanksStart(BaseException):
    """Raised where ranks would start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A command line: its words, and variables of the environment."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended, and the problems of its error."""

    code: int
    problems: tuple[Problem, ...]

    def of(self, rule: str) -> Problem | None:
        """Return the first problem of a rule; None for one that is part of a result."""
        return next((problem for problem in self.problems if problem.rule == rule), None)


def run(attempt: Attempt) -> Outcome:
    """Run a command in this process up to the start of its ranks."""
    problems: list[Problem] = []
    tell = app.print_error

    def note(error: EchelonError) -> None:
        problems.extend(error.problems)
        tell(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "print_error", note)
        for name, value in attempt.env.items():
            patch.setenv(name, value)
        try:
            code = main(attempt.words)
        except RanksStart:
            code = STARTED
    return Outcome(code=code, problems=tuple(problems))


def mended(attempt: Attempt, problem: Problem, suggestion: str, wrong: str) -> Attempt | None:
    """Return the command with a suggestion applied; None where it needs a word of the reader's.

    `wrong` is the word of the command that a suggestion without a flag or a key stands for.
    """
    words = [*attempt.words]
    if re.search(r"\b(FILE|FOLDER|SOURCE|RUN|MODULE|HOST|PATH|TEXT|DIR|N)\b|\.\.\.", suggestion):
        return None
    if suggestion.startswith("echelon "):
        return Attempt(words=tuple(shlex.split(suggestion)[1:]), env=attempt.env)
    if unset := re.match(r"unset ([A-Z_ ]+)", suggestion):
        env = {name: text for name, text in attempt.env.items() if name not in unset[1].split()}
        return Attempt(words=attempt.words, env=env)
    if variable := re.fullmatch(r"([A-Z][A-Z_]+)=(.*)", suggestion, re.DOTALL):
        env = {**attempt.env, variable[1]: shlex.split(variable[2])[0]}
        return Attempt(words=attempt.words, env=env)
    if flag := re.fullmatch(r"(?:without|no) (--[a-z-]+)(?: \S+)?", suggestion):
        return Attempt(words=tuple(_without(words, flag[1])), env=attempt.env)
    if suggestion.startswith("--"):
        words = _with_flags(words, shlex.split(suggestion))
    elif changes := _changes(suggestion, problem):
        words = _with_settings(words, changes)
    elif problem.rule == "unknown-key":
        words = [word.replace(problem.key, suggestion) for word in words]
    elif wrong:
        words = [
            suggestion if word == wrong else word.replace(f"={wrong}", f"={suggestion}")
            for word in words
        ]
    elif problem.key in SETTINGS:
        words = _with_settings(words, {problem.key: suggestion})
    else:
        return None
    return Attempt(words=tuple(words), env=attempt.env)


def _changes(suggestion: str, problem: Problem) -> dict[str, str]:
    """Return the settings that a suggestion such as "mesh.tp = 2 with mesh.pp = 1" changes."""
    table = problem.key.rpartition(".")[0]
    found: dict[str, str] = {}
    for part in suggestion.split(" with "):
        match = re.fullmatch(r"([a-z_.0-9]+) = (.+)", part, re.DOTALL)
        if match is None:
            return {}
        key = match[1] if "." in match[1] else f"{table}.{match[1]}"
        found[key] = match[2]
    return found


def _with_settings(words: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """Return a command with settings changed, in the place of those that it had."""
    kept: list[str] = []
    for word in words:
        key = word.partition("=")[0].strip()
        if kept[-1:] == ["--set"] and (key in changes or not key):
            kept.pop()
        else:
            kept.append(word)
    return [
        *kept,
        *(part for key, value in changes.items() for part in ("--set", f"{key}={value}")),
    ]


def _without(words: Sequence[str], flag: str) -> list[str]:
    kept: list[str] = []
    taken = False
    for word in words:
        if taken and not word.startswith("--"):
            taken = False
        elif word == flag:
            taken = True
        else:
            taken = False
            kept.append(word)
    return kept


def _with_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a command with flags in the place of those of the same names; `--set` adds."""
    if flags[0] == "--set":
        return _with_settings(words, dict([flags[1].split("=", 1)])) if flags[1:] else [*words]
    kept = [*words]
    for name in (word for word in flags if word.startswith("--")):
        kept = _without(kept, name)
    return [*kept, *flags]
