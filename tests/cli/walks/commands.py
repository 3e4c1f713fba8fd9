"""Commands of Echelon, run in turn as a user runs them, without the seconds that imports take.

Each command is a fork of a process that has imported what commands import: it calls the entry
point with the words that a user would type, in a given folder. Its ranks come from a fork server,
as in any run, which is forked from a template (`tests/fork_template.py`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.cli.main import main
from echelon.launch.local import rank_processes
from tests.fork_template import PRELOADED, ForkTemplate

TIMEOUT_S = 900.0
"""Seconds after which a command counts as one that hangs, on a machine that others use too."""
_MODULES = (
    *PRELOADED,
    "echelon.cli.app",
    "echelon.cli.prove",
    "echelon.cli.train",
    "echelon.cli.generate",
    "echelon.cli.other_tools",
    "echelon.cli.plan",
    "echelon.config.load",
    "echelon.proof.run",
    "echelon.proof.whole_run.whole_run",
    "echelon.training.inference",
)
_EXIT_TIMEOUT = 124  # as timeout(1) says it
_POLL_S = 0.02
_LAST_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """The end of a command: its exit code and outputs."""

    words: tuple[str, ...]
    """The words after `echelon`."""
    code: int
    """Its exit code; 124 where it took too long."""
    output: str
    """What it wrote to standard output."""
    errors: str
    """What it wrote to standard error."""
    seconds: float
    """How long it took."""

    @property
    def command(self) -> str:
        """Return the line that a user types to repeat it."""
        return shlex.join(("echelon", *self.words))

    @property
    def last_lines(self) -> str:
        """Return the end of both outputs."""
        return "\n".join([*self.output.splitlines(), *self.errors.splitlines()][-_LAST_LINES:])

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the rules that refused a command with --json; none where it was not refused."""
        try:
            answer: Any = json.loads(self.output)
        except ValueError:
            return ()
        return tuple(dict.fromkeys(problem["rule"] for problem in answer.get("problems", ())))


class Commands:
    """Run commands, one after the other."""

    def __init__(self, folder: Path) -> None:
        """Run commands in `folder`."""
        self._folder = folder

    def run(self, *words: str, timeout_s: float = TIMEOUT_S) -> CommandEnd:
        """Run one command and say how it ended."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            sys.stdout.flush()
            sys.stderr.flush()
            started = time.monotonic()
            pid = os.fork()
            if not pid:
                self._become_command(words, output.fileno(), errors.fileno())
            code = _code_of(pid, timeout_s)
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return CommandEnd(
            words=words,
            code=code,
            output=texts[0],
            errors=texts[1],
            seconds=round(time.monotonic() - started, 2),
        )

    def _become_command(self, words: Sequence[str], output: int, errors: int) -> None:
        code = 1
        try:
            os.chdir(self._folder)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            # pytest may have replaced the outputs of this process.
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = main(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _code_of(pid: int, timeout_s: float) -> int:
    """Return the exit code of a child; end it where it takes too long."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return _EXIT_TIMEOUT


@contextmanager
def commands_in(folder: Path) -> Iterator[Commands]:
    """Import what commands import, and yield what runs them in `folder`."""
    for module in _MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    template, before = ForkTemplate(), rank_processes.start_fork_server
    template.start()
    rank_processes.start_fork_server = template.start_fork_server
    try:
        yield Commands(folder)
    finally:
        rank_processes.start_fork_server = before
        template.close()
