"""Messages on stderr: notes, what `-v` adds, and the one line that says how far long work is."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Literal, TextIO

from echelon.core.messages import NOTES, PROGRESS, is_quiet
from echelon.core.plurals import in_singular

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
"""Flags of every command, which may stand anywhere in it."""

SHOWN_AFTER_S = 1.0  # s
TURN_S = 0.125  # s, of the sign on a terminal
LINE_EVERY_S = 10.0  # s, between two lines where stderr is no terminal


def split_loudness(arguments: Sequence[str]) -> tuple[list[str], set[Loudness]]:
    """Return a command without the flags of `FLAGS`, and what they ask for; none behind ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    asked = {FLAGS[word] for word in arguments[:end] if word in FLAGS}
    return [word for at, word in enumerate(arguments) if at >= end or word not in FLAGS], asked


class StderrHandler(logging.Handler):
    """Print notes on stderr, each once in a command, and on one rank of those of a launcher."""

    def __init__(self) -> None:
        """Start with nothing printed."""
        super().__init__()
        self._printed = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a note; progress has a line of its own (`working`)."""
        text = record.getMessage()
        of_progress = record.name == PROGRESS.name and record.levelno > logging.DEBUG
        other_rank = os.environ.get("RANK", "0") != "0" and record.levelno < logging.ERROR
        if not (of_progress or other_rank or text in self._printed):
            self._printed.add(text)
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)


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
    """Return the peak memory of this process, and that of its largest child."""
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
        print(in_singular(message), file=sys.stderr, flush=True)


class Newest(logging.Handler):
    """Keep the newest line that long work has logged about itself."""

    def __init__(self) -> None:
        """Start with no line."""
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.text = record.getMessage()


@contextmanager
def working(words: str, *, lines: bool = True, after_s: float = SHOWN_AFTER_S) -> Iterator[None]:
    """Say on stderr that work goes on, and how far it is, once it takes longer than a moment.

    A terminal has one line, rewritten and taken away at the end. Elsewhere `lines` are printed, after
    the first moment and every ten seconds.
    """
    stream = sys.stderr
    terminal = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    if stream is None or is_quiet() or not (terminal or lines):
        yield
        return
    newest, done = Newest(), threading.Event()
    show = _rewrite_line if terminal else _print_lines
    thread = threading.Thread(target=show, args=(stream, words, newest, done, after_s), daemon=True)
    PROGRESS.addHandler(newest)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        PROGRESS.removeHandler(newest)


def _rewrite_line(
    stream: TextIO, words: str, newest: Newest, done: threading.Event, after_s: float
) -> None:
    if done.wait(after_s):
        return
    with suppress(OSError, ValueError):
        for sign in cycle("|/-\\"):
            detail = f": {newest.text}" if newest.text else " ..."
            stream.write(f"\r\x1b[2K{sign} {words}{detail}")
            stream.flush()
            if done.wait(TURN_S):
                break
        stream.write("\r\x1b[2K")
        stream.flush()


def _print_lines(
    stream: TextIO, words: str, newest: Newest, done: threading.Event, after_s: float
) -> None:
    start_s, wait_s = time.monotonic(), after_s
    with suppress(OSError, ValueError):
        while not done.wait(wait_s):
            passed = f", {time.monotonic() - start_s:.0f} s" if wait_s > after_s else ""
            detail = f": {newest.text}" if newest.text else " ..."
            print(f"{words}{detail}{passed}", file=stream, flush=True)
            wait_s = LINE_EVERY_S
