# SPDX-License-Identifier: Apache-2.0
"""Where output goes: results to stdout, as text or as versioned JSON; all else to stderr.

On stderr are errors, notes, details of `-v`, and one line of progress for long work. How text is
laid out, `planner/view/text_layout.py` says.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from math import isfinite
from typing import Literal, TextIO

from echelon.core.errors import EchelonError, EnvironmentProblem
from echelon.core.messages.notes import NOTES, PROGRESS, is_quiet
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


Loudness = Literal["quiet", "normal", "verbose"]
LEVELS: dict[Loudness, int] = {
    "quiet": logging.ERROR,
    "normal": logging.INFO,
    "verbose": logging.DEBUG,
}
FLAGS: dict[str, Loudness] = {
    "-q": "quiet",
    "--quiet": "quiet",
    "-v": "verbose",
    "--verbose": "verbose",
}
"""Flags of every command, at any place of it."""

SHOWN_AFTER_S = 1.0  # s
TURN_S = 0.125  # s, of the sign on a terminal
CLEAR_LINE = "\r\x1b[2K"
LINE_EVERY_S = 10.0  # s, between two lines where stderr is no terminal


def split_loudness(arguments: Sequence[str]) -> tuple[list[str], set[Loudness]]:
    """Return a command without the flags of `FLAGS`, and their values; flags behind ``--`` stay."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    asked: set[Loudness] = {FLAGS[word] for word in arguments[:end] if word in FLAGS}
    return [word for at, word in enumerate(arguments) if at >= end or word not in FLAGS], asked


class StderrHandler(logging.Handler):
    """Print notes on stderr, each once in a command, on the first rank of a launch."""

    def __init__(self) -> None:
        """Start with nothing printed."""
        super().__init__()
        self._printed = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a note; progress has a separate line (`working`)."""
        text = record.getMessage()
        of_progress = record.name == PROGRESS.name and record.levelno > logging.DEBUG
        other_rank = record.levelno < logging.ERROR and _is_other_rank()
        if not (of_progress or other_rank or text in self._printed):
            self._printed.add(text)
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)


def _is_other_rank() -> bool:
    """True on the ranks of a launcher but the first; a wrong launch is reported elsewhere."""
    from echelon.core.errors import EchelonError
    from echelon.launch.environment import is_first_rank

    try:
        return not is_first_rank()
    except EchelonError:
        return os.environ.get("RANK", "0") != "0"


@contextmanager
def loudness(loud: Loudness) -> Iterator[None]:
    """Print the package's notes of this loudness while one command runs."""
    handler, before = StderrHandler(), NOTES.level
    NOTES.setLevel(LEVELS[loud])
    NOTES.addHandler(handler)
    start_s = time.perf_counter()
    try:
        yield
    finally:
        took_s = time.perf_counter() - start_s
        NOTES.debug(f"{took_s:.2f} s, {_peak_text()}")
        NOTES.removeHandler(handler)
        NOTES.setLevel(before)


def _peak_text() -> str:
    """Return the peak memory of this process and of its largest child."""
    import resource

    kib = 1 if sys.platform != "darwin" else 1024  # macOS counts bytes
    own, children = (
        resource.getrusage(who).ru_maxrss / kib / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    largest = f", {children:.0f} MiB of the largest process that it started" * (children > 0)
    return f"peak memory {own:.0f} MiB{largest}"


def note(message: str) -> None:
    """Print a message that is not the result, on stderr; `-q` silences it."""
    if not is_quiet():
        clear = CLEAR_LINE if _rewrites(sys.stderr) else ""
        print(f"{clear}{in_singular(message)}", file=sys.stderr, flush=True)


def _rewrites(stream: TextIO | None) -> bool:
    """True if a line of this stream can be rewritten, as on a terminal."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


class _Progress(logging.Handler):
    """Show the newest line that long work has logged, now and then."""

    def __init__(self, stream: TextIO, words: str, after_s: float) -> None:
        """Show nothing before `after_s`."""
        super().__init__()
        self._stream, self._words, self._after_s = stream, words, after_s
        self._terminal = _rewrites(stream)
        self._text, self._signs = "", cycle("|/-\\")
        self._start_s = self._shown_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._text = record.getMessage()

    @property
    def wait_s(self) -> float:
        """Return the seconds until the line is to be shown again."""
        if self._shown_s == self._start_s:
            return self._after_s
        return TURN_S if self._terminal else LINE_EVERY_S

    def show_if_due(self) -> None:
        """Show the line if the last line is old enough."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self.wait_s:
            return
        first, self._shown_s = self._shown_s == self._start_s, now_s
        detail = f": {self._text}" if self._text else " ..."
        passed = "" if first else f", {now_s - self._start_s:.0f} s"
        with suppress(OSError, ValueError):
            if self._terminal:
                self._stream.write(f"{CLEAR_LINE}{next(self._signs)} {self._words}{detail}")
            else:
                self._stream.write(in_singular(f"{self._words}{detail}{passed}\n"))
            self._stream.flush()

    def clear(self) -> None:
        """Clear the line of a terminal."""
        if self._terminal and self._shown_s != self._start_s:
            with suppress(OSError, ValueError):
                self._stream.write(CLEAR_LINE)
                self._stream.flush()


class _ProgressWithoutThread(_Progress):
    """Show lines as they are logged: a process with a second thread cannot fork safely."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, and show it if it is due."""
        super().emit(record)
        self.show_if_due()


@contextmanager
def working(
    words: str, *, lines: bool = True, forks: bool = False, after_s: float | None = None
) -> Iterator[None]:
    """Say on stderr that work goes on, and how far it is, once it takes longer than a moment.

    A terminal has one line, rewritten and cleared at the end. Elsewhere `lines` are printed,
    after the first moment and every ten seconds. Work that `forks` shows a line when it logs one.
    The first moment is `after_s`, or SHOWN_AFTER_S.
    """
    stream = sys.stderr
    silent = is_quiet() or _is_other_rank()
    if stream is None or silent or not (lines or _rewrites(stream)):
        yield
        return
    moment_s = SHOWN_AFTER_S if after_s is None else after_s
    shown = (_ProgressWithoutThread if forks else _Progress)(stream, words, moment_s)
    done = threading.Event()
    thread = threading.Thread(target=_show_until, args=(shown, done), daemon=True)
    PROGRESS.addHandler(shown)
    if not forks:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if not forks:
            thread.join()
        PROGRESS.removeHandler(shown)
        shown.clear()


def _show_until(shown: _Progress, done: threading.Event) -> None:
    while not done.wait(shown.wait_s):
        shown.show_if_due()
