"""The step line, and a progress bar where there is a terminal.

Lines go to stderr: they are not the result of a command. The bar is one line that leaves the
cursor at its start, so whatever is printed next writes over it, and a kill leaves a terminal that
needs no repair.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from echelon.core.units import duration

GIB = 2**30
_CLEAR_LINE = "\r\x1b[K"
_SUFFIXES = ("", "k", "M", "B", "T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Hold what the step line says; `mfu` is None where the peak of the device is not known.

    A loss scale of 1 is none, and is not shown; of a skipped step it is said. Of a model with
    experts, `imbalance` is that of its worst layer; `dropped_share` is None where nothing can be
    dropped, `aux_loss` where the loss has no such term.
    """

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    num_ranks: int
    rank_word: str
    used_bytes: int
    memory_bytes: int
    seconds_left: float
    mfu: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    imbalance: float | None = None
    dropped_share: float | None = None
    aux_loss: float | None = None

    def render(self) -> str:
        """Return the line."""
        per_rank = short(self.tokens_per_s / self.num_ranks)
        parts = [
            f"step {self.step}/{self.total_steps}",
            f"loss {self.loss:.4f}",
            f"grad_norm {self.grad_norm:.3g}",
            f"lr {scientific(self.learning_rate)}",
            f"tok/s {short(self.tokens_per_s)} ({per_rank}/{self.rank_word})",
        ]
        if self.imbalance is not None:
            parts.append(f"experts {self.imbalance:.2f}x")
        if self.dropped_share is not None:
            parts.append(f"dropped {100 * self.dropped_share:.1f}%")
        if self.aux_loss is not None:
            parts.append(f"aux {self.aux_loss:.4f}")
        if self.loss_scale != 1.0:
            parts.append(f"scale {self.loss_scale:g}")
        if self.skipped:
            parts.append("overflow: step skipped")
        if self.mfu is not None:
            parts.append(f"mfu {100 * self.mfu:.1f}%")
        used, total = self.used_bytes / GIB, self.memory_bytes / GIB
        parts.append(f"mem {used:.1f}/{total:.1f} GiB" if used >= 1 else f"mem {used:.2f} GiB")
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
        self._stream = sys.stderr if stream is None else stream
        self._log_every, self._total = log_every, total_steps
        self._terminal = _terminal_behind(self._stream)
        self._printed: set[int] = set()

    def step(self, line: StepLine) -> None:
        """Show one step: a line when it is due, and the bar.

        The first and the last are, and every one that was skipped.
        """
        end = line.step == self._total
        due = line.step % self._log_every == 0 or end or line.skipped or not self._printed
        if due:
            self._printed.add(line.step)
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

    def close(self) -> None:
        """Take the bar away."""
        self._clear_bar()
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def _draw_bar(self, line: StepLine) -> None:
        if self._terminal is None:
            return
        columns = min(100, os.get_terminal_size(self._terminal.fileno()).columns)
        done = line.step / max(1, line.total_steps)
        steps = f"{line.step}/{line.total_steps}"
        text = f" {100 * done:3.0f}%  {steps}  {duration(line.seconds_left)} left"
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
