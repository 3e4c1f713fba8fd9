"""Where ranks print: a log of each, and the terminal of the one that is shown."""

from __future__ import annotations

import io
import os
import sys
from errno import ENOSPC
from pathlib import Path
from typing import TextIO

import pytest

from echelon.launch.local.output import (
    TerminalAndLog,
    copy_to_log,
    log_name,
    say_if_possible,
)


class Terminal(io.StringIO):
    """A terminal in memory."""

    encoding = "latin-1"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 7


def test_text_goes_to_both_and_the_terminal_answers() -> None:
    terminal, log = Terminal(), io.StringIO()
    both = TerminalAndLog(terminal, log)
    print("a line", file=both, flush=True)
    assert terminal.getvalue() == log.getvalue() == "a line\n"
    assert (both.isatty(), both.fileno(), both.encoding) == (True, 7, "latin-1")


class FullDisk(io.StringIO):
    """A stream whose disk is full."""

    def write(self, text: str, /) -> int:
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def test_a_full_log_leaves_the_terminal_which_says_so_once() -> None:
    terminal = Terminal()
    both = TerminalAndLog(terminal, FullDisk())
    print("a line", file=both, flush=True)
    print("another", file=both, flush=True)
    lost = "the log of this rank cannot be written any more: [Errno 28] No space left on device\n"
    assert terminal.getvalue().replace(lost, "", 1) == "a line\nanother\n"


def test_what_a_rank_says_last_does_not_keep_it() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (FullDisk(), closed):
        say_if_possible("the end", stream)
    log = io.StringIO()
    say_if_possible("the end", log)
    assert log.getvalue() == "the end\n"


def test_logs_sort_as_ranks_do() -> None:
    assert log_name(3) == "rank-0003.log"
    assert log_name(12) > log_name(3)


def test_what_python_prints_is_copied_behind_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / log_name(0)
    path.write_text("before\n")
    logs: list[TextIO] = []

    def line_writer(descriptor: int) -> TextIO:
        logs.append(os.fdopen(descriptor, "w", buffering=1))
        return logs[-1]

    monkeypatch.setattr("echelon.launch.local.output._line_writer", line_writer)
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    copy_to_log(path)
    print("out")
    print("err", file=sys.stderr)
    (log,) = logs
    log.close()
    assert path.read_text() == "before\nout\nerr\n"
    assert shown.getvalue() == "out\nerr\n"
