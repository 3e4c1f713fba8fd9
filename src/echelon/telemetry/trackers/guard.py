# SPDX-License-Identifier: Apache-2.0
"""The process that starts and ends the mirrors of a run: it imports no tracker, so it can't hang.

`python -m echelon.telemetry.trackers.guard RUN PROJECT DRAIN_S TOOL...` runs beside a training run.
A mirror that ends is started again, later each time, while the run goes on. When standard input
ends the run has ended: each mirror has DRAIN_S seconds for what is left, however often it must be
started for it; then it is killed with all that it started. A megabyte of what it prints is kept.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from echelon.core.choices.trackers import TRACKERS, TrackerRecord
from echelon.telemetry.trackers.progress import log_path
from echelon.telemetry.trackers.tracker import tracker_folder

WORKER = "echelon.telemetry.trackers.worker"
_LOG_BYTES = 1 << 20  # of what one mirror prints beside one run
_FIRST_PAUSE_S = 1.0  # s before a mirror is started again
_LONGEST_PAUSE_S = 60.0  # s
_KILLED_AFTER_S = 5.0  # s beyond the time that it may take; it ends itself before
_NICENESS = 19  # the most: ranks go first


def worker_command(run: Path, tracker: str, project: str) -> list[str]:
    """Return the command of the process of one mirror."""
    return [sys.executable, "-m", WORKER, str(run), tracker, project]


class MirrorProcess:
    """Keep one mirror alive, and what it prints."""

    def __init__(self, run: Path, tracker: str, project: str) -> None:
        """Start it."""
        self.run, self.tracker, self._project = run, tracker, project
        self.process: subprocess.Popen[bytes] | None = None
        self.done = False
        self._pause_s, self._next_start = _FIRST_PAUSE_S, 0.0
        self._log = log_path(run, tracker).open("ab", buffering=0)
        self._left, self._dropped = _LOG_BYTES, 0
        self._flood: IO[bytes] | None = None

    def start(self, selector: selectors.BaseSelector) -> None:
        """Start the process; where the system has no room for it, later."""
        folder = tracker_folder(self.run, self.tracker)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.process = subprocess.Popen(
                worker_command(self.run, self.tracker, self._project),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=tracker_environment(TRACKERS[self.tracker], folder),
                start_new_session=True,
            )
        except OSError as error:
            self.keep(f"it cannot be started: {error}\n".encode())
            self._wait_longer()
            return
        assert self.process.stdout is not None, "it was started with a pipe"
        os.set_blocking(self.process.stdout.fileno(), False)
        selector.register(self.process.stdout, selectors.EVENT_READ, self)

    def restart_if_due(self, selector: selectors.BaseSelector) -> None:
        """Start it again where it ended and its pause is over, and read a drop of a flood."""
        if self._flood is not None:
            with suppress(BlockingIOError):
                self.read(self._flood, selector)
        if self.process is None and not self.done and time.monotonic() >= self._next_start:
            self.start(selector)

    def read(self, stream: IO[bytes], selector: selectors.BaseSelector) -> None:
        """Keep what it printed; where it has closed its output, look how it ended."""
        part = os.read(stream.fileno(), 1 << 16)
        if part:
            self.keep(part)
            if not self._left:
                # A flood is read drop by drop: whoever makes it waits, and takes no time of ranks.
                if self._flood is None:
                    selector.unregister(stream)
                self._flood = stream
            return
        if self._flood is None:
            selector.unregister(stream)
        self._flood = None
        stream.close()
        assert self.process is not None, "it has printed"
        code = self.process.wait()
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        kill_session(self.process)
        self.process = None
        self.done = code == 0
        if not self.done:
            self.keep(f"the mirror ended with {code}\n".encode())
            self._wait_longer()

    def say_ended(self) -> None:
        """Tell the process that the run has ended."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def start_now(self) -> None:
        """Wait no longer where it is to be started again."""
        self._pause_s, self._next_start = _FIRST_PAUSE_S, 0.0

    def keep(self, part: bytes) -> None:
        """Write what was printed into the log, as long as there is room in it."""
        kept = part[: self._left]
        self._left -= len(kept)
        self._dropped += len(part) - len(kept)
        try:
            self._log.write(kept)
        except OSError:
            self._dropped += len(kept)

    def finish(self, why: str) -> None:
        """Kill the process where it still runs, and close the log."""
        if self.process is not None:
            kill_session(self.process)
            self.keep(f"{why}\n".encode())
        if self._dropped:
            self._left = 200
            self.keep(f"\n{self._dropped} bytes more were not kept\n".encode())
        self._log.close()

    def _wait_longer(self) -> None:
        self._next_start = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class Guard:
    """Run the mirrors of a run until it ends, and for a bounded time after."""

    def __init__(self, mirrors: list[MirrorProcess], ended: int, drain_s: float) -> None:
        """Take the mirrors, and the pipe whose end is the end of the run."""
        self._mirrors, self._ended, self._drain_s = mirrors, ended, drain_s
        self._deadline: float | None = None

    def watch(self, clock: Callable[[], float] = time.monotonic) -> int:
        """Watch until all is mirrored, or the time is over; return 0 where all is mirrored."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ended, selectors.EVENT_READ)
            while not all(one.done for one in self._mirrors):
                if self._deadline is not None and clock() >= self._deadline:
                    break
                for one in self._mirrors:
                    one.restart_if_due(selector)
                for key, _ in selector.select(timeout=0.5):
                    if key.data is not None:
                        key.data.read(key.fileobj, selector)
                    else:
                        os.read(self._ended, 4096)
                        selector.unregister(self._ended)
                        self._deadline = clock() + self._drain_s
                        for one in self._mirrors:
                            one.start_now()
                if self._deadline is not None:
                    # One that is started after the end is told so at once.
                    for one in self._mirrors:
                        one.say_ended()
        for one in self._mirrors:
            one.finish(f"the run ended {self._drain_s:g} s ago: the mirror was killed")
        return 0 if all(one.done for one in self._mirrors) else 1


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


def main(arguments: list[str]) -> int:
    """Guard the mirrors that the arguments name; return the exit status."""
    run, project, drain_s, *trackers = arguments
    os.nice(_NICENESS)
    mirrors = [MirrorProcess(Path(run), one, project) for one in trackers]
    return Guard(mirrors, sys.stdin.fileno(), float(drain_s)).watch()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
