# SPDX-License-Identifier: Apache-2.0
"""The step line, and a progress bar where there is a terminal.

Lines go to stderr: they are not the result of a command. The bar is one line that leaves the
cursor at its start, so whatever is printed next writes over it, and a kill leaves a terminal that
needs no repair.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

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

    def validated(self, step: int, loss: float) -> None:
        """Print a validation loss."""
        self.say(f"step {step}/{self._total}  validation loss {loss:.4f}")

    def saved(self, step: int, path: Path) -> None:
        """Say that a checkpoint was committed."""
        self.say(f"step {step}/{self._total}  saved {path}")

    def noted(self, step: int, text: str) -> None:
        """Say what else happened by the end of a step."""
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
