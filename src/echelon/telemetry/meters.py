# SPDX-License-Identifier: Apache-2.0
"""Meters: tokens per second, the time that is left, the memory that is used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil


class Throughput:
    """Average tokens per second over the last steps: sums are divided, rates are not averaged.

    The first step warms up and is left out as soon as there is a second one.
    """

    def __init__(self, window: int = 20) -> None:
        """Look at the last `window` steps."""
        self._steps: deque[tuple[int, float]] = deque(maxlen=window)
        self._taken = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Take one step."""
        self._taken += 1
        if self._taken == 2:
            self._steps.clear()
        self._steps.append((tokens, seconds))

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second (0 before the first step)."""
        seconds = sum(s for _, s in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Return the mean seconds of a step (0 before the first)."""
        return sum(s for _, s in self._steps) / len(self._steps) if self._steps else 0.0


class TimeRemaining:
    """Estimate the seconds to the last step from all that passed, checkpoints included.

    The first step warms up and is left out as soon as there is a second one.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Count towards `total_steps`."""
        self._total, self._clock = total_steps, clock
        self._first: tuple[int, float] | None = None
        self._latest: tuple[int, float] | None = None

    def step(self, step: int) -> None:
        """Note that `step` steps are done."""
        self._latest = (step, self._clock())
        self._first = self._first or self._latest

    def seconds(self, first_step_s: float) -> float:
        """Return the seconds that are left; `first_step_s` stands in until two steps are done."""
        if self._first is None or self._latest is None:
            return self._total * first_step_s
        steps = self._latest[0] - self._first[0]
        each = (self._latest[1] - self._first[1]) / steps if steps > 0 else first_step_s
        return max(0, self._total - self._latest[0]) * each


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Give the bytes in use now, the most there were, and what there is."""

    used_bytes: int
    peak_bytes: int
    total_bytes: int


def process_memory() -> MemoryReading:
    """Return the resident memory of this process and that of the machine."""
    used = psutil.Process().memory_info().rss
    peak = max(used, _peak_bytes())
    return MemoryReading(
        used_bytes=used, peak_bytes=peak, total_bytes=psutil.virtual_memory().total
    )


def device_memory() -> MemoryReading:
    """Return the memory of the current GPU that the allocator of torch holds."""
    from torch import cuda

    return MemoryReading(
        used_bytes=cuda.memory_reserved(),
        peak_bytes=cuda.max_memory_reserved(),
        total_bytes=cuda.mem_get_info()[1],
    )


def _peak_bytes() -> int:
    """Return the high-water mark that Linux keeps, or 0 elsewhere."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
