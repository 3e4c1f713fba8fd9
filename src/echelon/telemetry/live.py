# SPDX-License-Identifier: Apache-2.0
"""A run while it goes on, from its folder alone: what is new in its metrics, and how it stands.

Only what was added since the last look is read. It needs nothing of the run but its files: a run
on other hosts is followed wherever its folder can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, median

from echelon.core.units import binary_bytes, duration
from echelon.telemetry.console import scientific, short
from echelon.telemetry.events import METRICS_FILE, START, STEP
from echelon.telemetry.json_lines import (
    LogEntry,
    end_of_whole_lines,
    last_of_each_step,
    read_entries,
)
from echelon.telemetry.run_directory import open_run

_LATE = 50
"""Steps whose median says how long the next ones take."""
_NAME = 9  # columns of the name of a curve

UNICODE = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Marks that fill one to eight eighths of a line."""
ASCII = "_.-=+*%#"
"""Marks for a terminal without those: each has more ink, and stands no lower, than the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSteps:
    """Hold the steps that a run took so far, and how many it is to take."""

    steps: tuple[LogEntry, ...]
    validation: float | None
    total_steps: int

    @property
    def finished(self) -> bool:
        """Return whether the last step is done."""
        return bool(self.steps) and self.steps[-1].whole("step") >= self.total_steps

    def status(self) -> str:
        """Return how the run stands, in a line; what matters most is first."""
        if not self.steps:
            return f"step 0/{self.total_steps}  no step is done yet"
        last = self.steps[-1]
        parts = [f"step {last.whole('step')}/{self.total_steps}"]
        if (loss := self._last("loss")) is not None:
            parts.append(f"loss {loss:.4g}")
        if rates := [rate for rate in self.rates()[-_LATE:] if rate is not None]:
            parts.append(f"tok/s {short(median(rates))}")
        left = self.total_steps - last.whole("step")
        if seconds := [one for one in self._seconds()[-_LATE:] if one is not None]:
            parts.append(f"eta {duration(max(0.0, left * median(seconds)))}")
        if self.validation is not None:
            parts.append(f"validation {self.validation:.4g}")
        if (norm := self._last("grad_norm")) is not None:
            parts.append(f"grad_norm {norm:.4g}")
        if (rate := self._last("learning_rate")) is not None:
            parts.append(f"lr {scientific(rate)}")
        if "peak_bytes" in last.values:
            parts.append(f"mem {binary_bytes(last.whole('peak_bytes'))}")
        return "  ".join(parts)

    def curves(self, columns: int, marks: str = UNICODE) -> list[str]:
        """Return loss and tokens/s as lines of `columns` at most; none before there are two."""
        if len(self.steps) < 2:
            return []
        losses = [step.number("loss") for step in self.steps]
        return [
            *_curve("loss", losses, columns, marks, lambda one: f"{one:.4g}"),
            *_curve("tok/s", self.rates(), columns, marks, short),
        ]

    def rates(self) -> list[float | None]:
        """Return the tokens per second of each step."""
        pairs = zip(self.steps, self._seconds(), strict=True)
        return [step.whole("tokens") / seconds if seconds else None for step, seconds in pairs]

    def _last(self, key: str) -> float | None:
        """Return a number of the last step; None where it has none."""
        last = self.steps[-1]
        return last.number(key) if key in last.values else None

    def _seconds(self) -> list[float | None]:
        return [step.number("step_s") for step in self.steps]


def _curve(
    name: str,
    values: Sequence[float | None],
    columns: int,
    marks: str,
    text: Callable[[float], str],
) -> Iterator[str]:
    """Yield a curve with its first and its last value; nothing where there is no value."""
    there = [value for value in values if value is not None]
    if there:
        ends = f"  {text(there[0])} to {text(there[-1])}"
        room = max(columns - _NAME - len(ends), 10)
        yield f"{name.ljust(_NAME)}{sparkline(values, room, marks)}{ends}"


class RunFollower:
    """Read what a run adds to its metrics."""

    def __init__(self, path: Path) -> None:
        """Open the run at `path`; ConfigError where there is none."""
        plan = open_run(path).plan()
        self._file = path / METRICS_FILE
        self._read = 0
        self._steps: list[LogEntry] = []
        self._validation: float | None = None
        self._total = plan.mathematics.optimizer.total_steps

    def look(self) -> bool:
        """Read what is new, and return whether there was something.

        ConfigError where a line of it cannot be read.
        """
        end = end_of_whole_lines(self._file, self._read)
        if end == self._read:
            return False
        for entry in read_entries(self._file, self._read, end):
            kind = entry.text("kind")
            if kind == START:
                self._total = entry.whole("steps")
            elif kind == STEP:
                self._steps.append(entry)
            elif kind == "validation":
                self._validation = entry.number("loss")
        self._steps = last_of_each_step(self._steps)
        self._read = end
        return True

    def now(self) -> FollowedSteps:
        """Return how the run stands, as of the last look."""
        return FollowedSteps(
            steps=tuple(self._steps), validation=self._validation, total_steps=self._total
        )


def sparkline(values: Sequence[float | None], columns: int, marks: str = UNICODE) -> str:
    """Return values as `columns` marks at most, each the mean of those that follow one another.

    A space stands for what has no value; all values alike are marks of the middle.
    """
    means = [*_means(values, columns)]
    there = [one for one in means if one is not None]
    if not there:
        return ""
    low, high = min(there), max(there)
    span = high - low
    return "".join(" " if one is None else _mark(one - low, span, marks) for one in means)


def _mark(above: float, span: float, marks: str) -> str:
    if not 0 < span < float("inf"):
        return marks[len(marks) // 2]
    return marks[min(int(above / span * len(marks)), len(marks) - 1)]


def _means(values: Sequence[float | None], columns: int) -> list[float | None]:
    count = min(len(values), max(columns, 1))
    found: list[float | None] = []
    for column in range(count):
        begin, end = (len(values) * at // count for at in (column, column + 1))
        there = [one for one in values[begin:end] if one is not None and isfinite(one)]
        found.append(fmean(there) if there else None)
    return found
