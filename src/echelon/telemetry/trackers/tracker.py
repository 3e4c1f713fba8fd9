# SPDX-License-Identifier: Apache-2.0
"""What a tracker can do for a mirror, and what it is told of a run: lines of metrics.jsonl.

A line is a step, numbers and texts under stable names. Steps that a resumed run took again are
there once, as they were taken last.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from echelon.core.choices.trackers import TRACKERS_FOLDER
from echelon.core.parameters import num_parameters
from echelon.core.version import __version__
from echelon.telemetry.events import METRICS_FILE, START, STEP
from echelon.telemetry.json_lines import LogEntry, end_of_whole_lines, read_entries
from echelon.telemetry.run_directory import open_run

ENTRY = "run/entry"
"""The number of the line in metrics.jsonl: what a tracker has is known by the largest."""

STEP_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/learning_rate",
        "loss_scale": "train/loss_scale",
        "skipped": "train/skipped",
        "tokens": "train/tokens",
        "step_s": "speed/step_s",
        "peak_bytes": "memory/peak_bytes",
        "imbalance": "experts/imbalance",
        "assignments": "experts/assignments",
        "dropped": "experts/dropped",
        "aux_loss": "experts/aux_loss",
        "z_loss": "experts/z_loss",
    }
)
"""What a number of a step is called in trackers."""
TOKENS_PER_S = "speed/tokens_per_s"
VALIDATION_LOSS = "validation/loss"
RANK_NAMES: Mapping[str, str] = MappingProxyType(
    {"rank_waits_s": "waits_s", "rank_used_bytes": "used_bytes"}
)
"""What the numbers of single ranks are called: ``waits_s/rank_0003``, ``waits_s/max``."""
MOST_RANKS = 64
"""Of more ranks only the least and the most are mirrored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Say which run a tracker is to hold, and under what name."""

    folder: Path
    """Where its files go, unless the user's environment says where."""
    project: str
    """What keeps runs together: a project, an experiment."""
    group: str
    """The name of our run."""
    revision: int
    """1, and one more each time that steps were taken again and the tracker cannot forget them."""
    id: str
    """What the tracker calls the run, as it said the last time; empty: it has none yet."""
    config: Mapping[str, object]
    """The settings of the run, and what follows from them."""

    @property
    def name(self) -> str:
        """Return the name of the run in the tracker."""
        return self.group if self.revision == 1 else f"{self.group}-{self.revision}"


class Tracker(Protocol):
    """Write the points of one run into a tracker; what fails raises, and is tried again later."""

    rewinds: bool = False
    """Whether it can forget what follows a step."""

    def open(self, run: TrackedRun) -> str:
        """Begin a run, or go on with it where it has an id; return the id."""
        ...

    def recorded(self) -> int | None:
        """Return the largest line number that it has; None where it cannot say."""
        ...

    def rewind(self, step: int) -> None:
        """Forget this step and what follows it; asked only of one that can."""
        raise AssertionError(f"{type(self).__name__} cannot rewind")

    def write(self, points: Sequence[Point]) -> None:
        """Write points; once this returns they are the tracker's."""
        ...

    def close(self) -> None:
        """Let go of the run; it may be opened again."""
        ...


def tracker_folder(run: Path, tracker: str) -> Path:
    """Return where a tracker has its files in a run."""
    return run / TRACKERS_FOLDER / tracker


def config_of(run: Path) -> dict[str, object]:
    """Return what trackers are told of a run: its settings, and what follows from its plan.

    No variable of the environment and nothing of the command line is among it.
    """
    directory = open_run(run)
    plan = directory.plan()
    with directory.run_file.open("rb") as file:
        settings = dict(_flat(tomllib.load(file), ""))
    return {
        **settings,
        "plan_hash": plan.content_hash(),
        "parameters": num_parameters(plan.model),
        "world_size": plan.mesh.world_size,
        "microbatches": plan.num_microbatches,
        "tokens_per_step": plan.tokens_per_step,
        "cluster": plan.cluster.name,
        "echelon": __version__,
    }


def _flat(table: Mapping[str, object], prefix: str) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Hold what one line of metrics.jsonl says; `number` is its line, counted from 1."""

    number: int
    kind: str
    step: int
    time_s: float
    values: Mapping[str, float]
    texts: Mapping[str, str]

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing in it that a tracker takes."""
        return not self.values and not self.texts

    def numbers(self) -> dict[str, float]:
        """Return the numbers, that of the line among them."""
        return {**self.values, ENTRY: float(self.number)}


def point_of(entry: LogEntry, number: int, last_step: int) -> Point:
    """Return a line as a point; one that names no step belongs to the last one."""
    kind = entry.text("kind")
    step = entry.whole("step") if "step" in entry.values else last_step
    values, texts = dict[str, float](), dict[str, str]()
    if kind == STEP:
        values = dict(_step_values(entry))
    elif kind == "validation":
        values = _numbers(entry, {"loss": VALIDATION_LOSS})
    elif kind == START:
        texts["events/start"] = f"plan {entry.text('plan_hash')}, {entry.whole('steps')} steps"
    elif kind == "checkpoint":
        texts["events/checkpoint"] = entry.text("path")
    elif kind == "note":
        texts["events/note"] = entry.text("text")
    return Point(
        number=number,
        kind=kind,
        step=step,
        time_s=entry.number("time") or 0.0,
        values=values,
        texts=texts,
    )


def _step_values(entry: LogEntry) -> Iterator[tuple[str, float]]:
    yield from _numbers(entry, STEP_NAMES).items()
    seconds = entry.number("step_s")
    if seconds:
        yield TOKENS_PER_S, entry.whole("tokens") / seconds
    for key, name in RANK_NAMES.items():
        found = [float(one) for one in entry.values.get(key, ()) if one is not None]
        if not found:
            continue
        yield f"{name}/min", min(found)
        yield f"{name}/max", max(found)
        if len(found) <= MOST_RANKS:
            for rank, value in enumerate(found):
                yield f"{name}/rank_{rank:04d}", value


def _numbers(entry: LogEntry, names: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers that a line has; one that was not finite is left out."""
    found: dict[str, float] = {}
    for key, name in names.items():
        if isinstance(value := entry.values.get(key), bool):
            found[name] = float(value)
        elif key in entry.values and (number := entry.number(key)) is not None:
            found[name] = float(number)
    return found


def as_taken_last(points: Iterable[Point]) -> list[Point]:
    """Return points without those of steps that were taken again later.

    A start stays: it is put behind the step from which it went on.
    """
    kept: list[Point] = []
    for point in points:
        starts: list[Point] = []
        if point.kind == STEP:
            while kept and kept[-1].step >= point.step:
                gone = kept.pop()
                if gone.kind == START:
                    starts.insert(0, replace(gone, step=max(0, point.step - 1)))
        kept += [*starts, point]
    return kept


class MetricsReader:
    """Read what a run adds to its metrics, as points."""

    def __init__(self, run: Path) -> None:
        """Begin before the first line of the metrics of the run in `run`."""
        self._file = run / METRICS_FILE
        self._place = 0
        self._last_step = 0
        self._lines = 0

    def look(self, *, final: bool) -> list[Point]:
        """Return what is new.

        A start that nothing follows yet waits for what does, unless this look is the `final` one:
        it belongs to the step from which it goes on. ConfigError where a line cannot be read.
        """
        end = end_of_whole_lines(self._file, self._place)
        entries = list(read_entries(self._file, self._place, end))
        if entries and not final and entries[-1].text("kind") == START:
            end = entries.pop().place
        found: list[Point] = []
        for entry in entries:
            self._lines += 1
            found.append(point_of(entry, self._lines, self._last_step))
            self._last_step = found[-1].step
        self._place = end
        return found
