# SPDX-License-Identifier: Apache-2.0
"""The step line and its meters, and a progress bar where there is a terminal.

Lines go to stderr: they are not the result of a command. The bar is one line that leaves the
cursor at its start, so whatever is printed next writes over it, and a kill leaves a terminal that
needs no repair.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from echelon.core.plan import Plan
from echelon.core.units import GIB, duration, gib
from echelon.launch.local.output import stream_of_notes
from echelon.training.observer import StepFacts

_CLEAR_LINE = "\r\x1b[K"
_SUFFIXES = ("", "k", "M", "B", "T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Hold what the step line says of a step, of `total_steps` that the run does.

    `tokens_per_s` is that of all ranks, `memory_bytes` what there are, `seconds_left` to the end of
    the run; `mfu` is the model FLOP/s over the peak, None where that is not known.
    """

    facts: StepFacts
    plan: Plan
    total_steps: int
    tokens_per_s: float
    memory_bytes: int
    seconds_left: float
    mfu: float | None = None

    def render(self) -> str:
        """Return the line."""
        facts, routing, plan = self.facts, self.facts.routing, self.plan
        per_rank = short(self.tokens_per_s / plan.mesh.world_size)
        word = "rank" if plan.cluster.backend == "gloo" else "gpu"
        parts = [
            f"step {facts.step}/{self.total_steps}",
            f"loss {facts.loss:.4f}",
            f"grad_norm {facts.grad_norm:.3g}",
            f"lr {scientific(facts.learning_rate)}",
            f"tok/s {short(self.tokens_per_s)} ({per_rank}/{word})",
        ]
        if routing is not None:
            balance = plan.mathematics.balance
            parts.append(f"experts {routing.imbalance:.2f}x")
            if balance.capacity_factor is not None:
                parts.append(f"dropped {100 * routing.dropped_share:.1f}%")
            if balance.has_aux:
                parts.append(f"aux {routing.aux_loss:.4f}")
        if facts.loss_scale != 1.0:
            parts.append(f"scale {facts.loss_scale:g}")
        if facts.skipped:
            parts.append("overflow: step skipped")
        if self.mfu is not None:
            parts.append(f"mfu {100 * self.mfu:.1f}%")
        used = max(facts.rank_used_bytes)
        whole = f"/{gib(self.memory_bytes)}" * (used >= GIB)
        parts.append(f"mem {gib(used)}{whole} GiB")
        parts.append(f"eta {duration(self.seconds_left)}")
        return "  ".join(parts)


def short(value: float) -> str:
    """Return four digits at most and a suffix: ``412.3k``."""
    power = 0
    while abs(value) >= 999.95 and power < len(_SUFFIXES) - 1:
        value /= 1000
        power += 1
    digits = 0 if abs(value) >= 999.5 else 1 if abs(value) >= 99.95 else 2
    return f"{value:.{digits}f}{_SUFFIXES[power]}"


def scientific(value: float) -> str:
    """Return a learning rate as people write it: ``3.0e-4``."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


class Console:
    """Print a line every few steps, and on a terminal a bar that moves at every step."""

    def __init__(self, *, log_every: int, total_steps: int, stream: TextIO | None = None) -> None:
        """Print to `stream` (stderr by default) a line every `log_every` steps."""
        self._stream = stream_of_notes() if stream is None else stream
        self._log_every, self._total = log_every, total_steps
        self._terminal = _terminal_behind(self._stream)
        self._printed = False
        self._waiting: StepLine | None = None

    def step(self, line: StepLine) -> None:
        """Show one step: a line when it is due, and the bar.

        The first and the last are, and every one that was skipped. The last of a run that ends
        before its time is told when the console is closed.
        """
        step = line.facts.step
        due = step % self._log_every == 0 or step == self._total or line.facts.skipped
        due = due or not self._printed
        self._waiting = None if due else line
        if due:
            self._printed = True
            self.say(line.render())
        self._draw_bar(line)

    def say(self, text: str) -> None:
        """Print one line."""
        self._clear_bar()
        print(text, file=self._stream, flush=True)

    def noted(self, step: int, text: str) -> None:
        """Say what happened by the end of a step."""
        self.say(f"step {step}/{self._total}  {text}")

    def close(self) -> None:
        """Take the bar away, and print the last step where its line was not due."""
        if self._waiting is not None:
            self.say(self._waiting.render())
            self._waiting = None
        self._clear_bar()
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def _draw_bar(self, line: StepLine) -> None:
        if self._terminal is None:
            return
        columns = min(100, os.get_terminal_size(self._terminal.fileno()).columns)
        step, total = line.facts.step, line.total_steps
        done = step / max(1, total)
        text = f" {100 * done:3.0f}%  {step}/{total}  {duration(line.seconds_left)} left"
        width = max(0, columns - len(text) - 3)
        filled = round(width * min(1.0, done))
        bar = f"[{'#' * filled}{'.' * (width - filled)}]{text}"
        self._terminal.write(f"{_CLEAR_LINE}{bar[: columns - 1]}\r")
        self._terminal.flush()

    def _clear_bar(self) -> None:
        if self._terminal is not None:
            self._terminal.write(_CLEAR_LINE)
            self._terminal.flush()


def _terminal_behind(stream: TextIO) -> TextIO | None:
    """Return the terminal that `stream` ends at, opened anew, or None where there is none.

    A rank's stderr goes to its log as well; the bar belongs on the terminal only.
    """
    try:
        if stream.isatty() and os.isatty(stream.fileno()):
            return os.fdopen(os.dup(stream.fileno()), "w", encoding="utf-8", errors="replace")
    except OSError:
        pass
    return None


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
