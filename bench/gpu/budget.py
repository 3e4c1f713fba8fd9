"""Time that a run may take: a share for every part, and commands that end when theirs is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST_S = 20.0
"""Seconds that anything needs at least: torch is imported, a model built, steps warmed up."""


class Budget:
    """Share the seconds of a run among its parts; what one leaves over goes to the next ones."""

    def __init__(
        self,
        total_s: float,
        shares: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start now; `shares` are the weights of the parts, in the order in which they run."""
        self._clock = clock
        self._end = clock() + total_s
        self._shares = dict(shares)
        self._part_end = self._end

    def begin(self, part: str) -> None:
        """Give a part its share of what is left."""
        left = max(0.0, self._end - self._clock())
        share = self._shares[part] / sum(self._shares.values())
        del self._shares[part]
        self._part_end = self._clock() + left * share

    @property
    def left_s(self) -> float:
        """Return the seconds that are left for the part that runs."""
        return self._part_end - self._clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Say how a command ended; `code` None: its time was over, and it was killed."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run_limited(
    command: Sequence[str],
    *,
    limit_s: float,
    cwd: Path,
) -> Ended:
    """Run a command, and end it and all that it started after `limit_s`.

    Output goes to files: a worker of the compiler that outlives its parent would keep a pipe open.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=err, start_new_session=True)
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_session(process)
        texts: list[str] = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    seconds = time.monotonic() - start
    return Ended(code=code, stdout=texts[0], stderr=texts[1], seconds=seconds)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the group that the command leads, whether or not it ended itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
