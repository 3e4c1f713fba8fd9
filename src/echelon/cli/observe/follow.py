# SPDX-License-Identifier: Apache-2.0
"""`echelon observe RUN --follow`: how a run stands while it trains, until it ends or Ctrl-C.

A terminal has a status line and the curves of loss and tokens/s, drawn again in their place; what
goes into a pipe or a file gets a line for each look that found something new.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import get_terminal_size
from time import sleep
from typing import TextIO

from echelon.cli.output import WIDEST
from echelon.telemetry.live import ASCII, UNICODE, RunFollower

LOOK_S = 1.0  # s between two looks


def follow(path: Path, *, wait: Callable[[float], None] = sleep) -> int:
    """Show how the run at `path` stands until its last step is done; Ctrl-C ends it before.

    ConfigError where there is no run, or its metrics cannot be read.
    """
    follower, screen = RunFollower(path), _Screen(sys.stdout)
    while True:
        new = follower.look()
        now = follower.now()
        if new or not screen.shown:
            screen.show([now.status(), *now.curves(screen.columns, screen.marks)])
        if now.finished:
            return 0
        wait(LOOK_S)


class _Screen:
    """Lines that are drawn over the ones before on a terminal; elsewhere the first of them."""

    def __init__(self, stream: TextIO) -> None:
        self.shown = False
        self._stream = stream
        self._over = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lines = 0

    @property
    def columns(self) -> int:
        """Return the columns of a line: a terminal must not wrap it, or it can't be drawn over."""
        return min(get_terminal_size().columns, WIDEST) - 1

    @property
    def marks(self) -> str:
        """Return the marks of curves that the stream can write."""
        try:
            UNICODE.encode(self._stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return ASCII
        return ASCII if os.environ.get("TERM") in ("dumb", "linux") else UNICODE

    def show(self, lines: list[str]) -> None:
        """Draw lines; what was there before is gone."""
        self.shown = True
        if not self._over:
            print(lines[0], file=self._stream, flush=True)
            return
        back = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
        cut = [line[: self.columns] for line in lines]
        print(back + "\n".join(cut), file=self._stream, flush=True)
        self._lines = len(cut)
