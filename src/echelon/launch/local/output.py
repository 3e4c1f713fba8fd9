# SPDX-License-Identifier: Apache-2.0
"""Where the output of a rank goes: its log, and for a shown rank the terminal as well."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TextIO

from echelon.core.messages.notes import is_quiet


class TerminalAndLog(io.TextIOBase):
    """Write to the terminal and to the log; be the terminal to whoever asks.

    Where the log cannot be written (its disk is full), the terminal says so once and goes on alone.
    """

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        """Write to both from now on."""
        super().__init__()
        self._terminal = terminal
        self._log: TextIO | None = log

    @property
    def encoding(self) -> str:
        """Return the encoding of the terminal."""
        return self._terminal.encoding

    def write(self, text: str, /) -> int:
        """Write `text` to both."""
        length = self._terminal.write(text)
        if self._log is not None:
            try:
                self._log.write(text)
            except OSError as error:
                self._give_up_log(error)
        return length

    def flush(self) -> None:
        """Flush both."""
        self._terminal.flush()
        if self._log is not None:
            try:
                self._log.flush()
            except OSError as error:
                self._give_up_log(error)

    def _give_up_log(self, error: OSError) -> None:
        log, self._log = self._log, None
        self._terminal.write(f"the log of this rank cannot be written any more: {error}\n")
        if log is not None:
            # What it still holds is lost; to close it now keeps the interpreter from trying again.
            with contextlib.suppress(OSError):
                log.close()

    @property
    def log(self) -> TextIO | None:
        """Return the log, None where it could not be written any more."""
        return self._log

    def isatty(self) -> bool:
        """Return whether the terminal is one."""
        return self._terminal.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the terminal."""
        return self._terminal.fileno()


def say_if_possible(text: str, stream: TextIO | None) -> None:
    """Write a line at once, unless it cannot be written: then what is said next counts more.

    A rank that ends must end, and must have told others why, whatever has become of its log.
    """
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def stream_of_notes() -> TextIO:
    """Return stderr, and of a rank whose notes are silenced its log alone."""
    if not is_quiet():
        return sys.stderr
    log = sys.stderr.log if isinstance(sys.stderr, TerminalAndLog) else None
    return io.StringIO() if log is None else log


def log_name(rank: int) -> str:
    """Return the name of the log file of a rank."""
    return f"rank-{rank:04d}.log"


def redirect_to_log(path: Path, *, shown: bool) -> None:
    """Send what this process writes to the file at `path`; a shown rank's Python streams to both.

    Native code writes to descriptors 1 and 2, which are the log: the terminal stays readable.
    """
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    terminal = [os.dup(1), os.dup(2)] if shown else []
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    if shown:
        sys.stdout = TerminalAndLog(_line_writer(terminal[0]), sys.stdout)
        sys.stderr = TerminalAndLog(_line_writer(terminal[1]), sys.stderr)


def copy_to_log(path: Path) -> None:
    """Write what Python prints to the file at `path` as well: for ranks of another launcher."""
    log = _line_writer(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    sys.stdout = TerminalAndLog(sys.stdout, log)
    sys.stderr = TerminalAndLog(sys.stderr, log)


def _line_writer(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="replace")
