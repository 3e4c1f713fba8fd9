# SPDX-License-Identifier: Apache-2.0
"""Where output goes: results to stdout, errors to stderr, and `--json` is one versioned object.

How text is laid out, `planner/view/text_layout.py` says.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TextIO

from echelon.core.errors import EchelonError, EnvironmentProblem
from echelon.core.messages.plurals import in_singular
from echelon.core.rulebook.config import OUTPUT_WRITABLE
from echelon.planner.view.text_layout import WIDTH

NARROWEST = 60  # columns
WIDEST = 160  # columns; of a list that goes into a pipe, too: a row is a line there
JSON_SCHEMA = 1  # of the written JSON


def print_json(command: str, result: Mapping[str, object]) -> None:
    """Print the one object that `--json` promises: its schema, the command, and the result."""
    answer = {"schema": JSON_SCHEMA, "command": command, **result}
    print(json.dumps(_with_finite_numbers(answer), indent=2, allow_nan=False))


def _with_finite_numbers(value: object) -> object:
    """A value for JSON, which has no infinity: it is written as the text "inf"."""
    if isinstance(value, Mapping):
        return {key: _with_finite_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(part) for part in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def print_result(
    command: str,
    to_json: Callable[[], Mapping[str, object]],
    to_text: Callable[[], str],
    *,
    as_json: bool,
) -> None:
    """Print a result in one of its two forms; the text ends its own last line."""
    if as_json:
        print_json(command, to_json())
    else:
        print(in_singular(to_text()), end="")


def print_error(error: EchelonError) -> None:
    """Print every problem of `error` on stderr, in color where that is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for problem in error.problems:
        text = Text(problem.render())
        text.highlight_regex(r"\Aerror\[[^\]]*\]", "bold red")
        text.highlight_regex(r"\n  .*", "dim")
        console.print(text)


def print_error_json(
    command: str, error: EchelonError, more: Mapping[str, object] | None = None
) -> None:
    """Print the problems of `error` as the one object on stdout that `--json` promises.

    `more` has further values about them.
    """
    problems = [problem.to_json() for problem in error.problems]
    print_json(command, {"error": True, "problems": problems, **(more or {})})


def page_columns(without: int = WIDTH) -> int:
    """Return the columns of a page: those of the terminal from 60 to 160, else `without`.

    COLUMNS in the environment wins, as it does in other programs.
    """
    shown = sys.stdout is not None and sys.stdout.isatty()
    if not shown and not os.environ.get("COLUMNS"):
        return without
    columns = shutil.get_terminal_size((without, 24)).columns
    return min(max(columns, NARROWEST), WIDEST)


def stdout_refuses() -> bool:
    """Return whether standard output can no longer be written to, by writing an empty line."""
    if sys.stdout is None:
        return False
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def report_refused(error: OSError) -> int:
    """Say on stderr that the result could not be written, if that can be, and return the code."""
    reason = error.strerror or str(error)
    problem = OUTPUT_WRITABLE.problem(
        f"the output could not be written to its end: {reason}", suggestions=("a disk with room",)
    )
    refused = EnvironmentProblem(problem)
    give_up(sys.stdout)
    try:
        print_error(refused)
    except OSError:
        give_up(sys.stderr)
    return refused.exit_code


def give_up(stream: TextIO) -> None:
    """Send what is still to be written to `stream` nowhere: else it would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
