# SPDX-License-Identifier: Apache-2.0
"""A process beside a run, which the run never waits for: started before its ranks, ended after.

It reads nothing from us but the end of its standard input, which comes when the run ends, however
that ends: the system closes a pipe of a process that was killed. What it prints goes into a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from echelon.core.choices.trackers import TrackerRecord

_KILLED_AFTER_S = 5.0  # s beyond the time that it may take; it ends itself before
_NICENESS = 19  # the most: ranks go first


class Companion:
    """Hold a process of our own that runs beside a run."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        """Start `python -m module arguments`; OSError where the system has no room for it."""
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                # Ctrl-C in the terminal stops the ranks; this one goes on until they have ended.
                start_new_session=True,
            )

    def end(self, wait_s: float) -> bool:
        """Say that the run has ended, wait so long at most, and return whether it came to an end.

        Ctrl-C ends the wait; a process that does not end by itself is killed.
        """
        assert self._process.stdin is not None, "it was started with a pipe"
        with suppress(OSError):
            # Said, too: a process that was forked meanwhile may hold the pipe open.
            self._process.stdin.write(b"ended\n")
            self._process.stdin.close()
        try:
            self._process.wait(wait_s + _KILLED_AFTER_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            kill_session(self._process)
            return False
        return self._process.returncode == 0


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, with all that it has started there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def give_way() -> None:
    """Let the processes of ranks run before this one, and what it starts."""
    os.nice(_NICENESS)


def tracker_environment(
    tracker: TrackerRecord, folder: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a tracker's process: that of the user, and what he left open.

    Where the user says where runs go, what says it is left as it is.
    """
    unset = {
        name: value.replace("{}", str(folder.absolute()))
        for name, value in tracker.environment.items()
        if not environment.get(name)
    }
    return {**environment, **unset, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
