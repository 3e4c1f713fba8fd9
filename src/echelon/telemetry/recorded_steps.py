# SPDX-License-Identifier: Apache-2.0
"""Find single steps in the events of a run, without reading the rest of its files.

A rank loads the batch of a step, an event of kind "load", runs its actions, and when all ranks have
agreed on the step it writes its mark: an event of kind "step". Rank 0 writes the same mark into
metrics.jsonl, which says what was taken, and again. So each step is found in each file by itself,
whatever a kill kept another start, or another rank, from writing. The files of a long run are
large; they are searched for these lines as bytes, and only the lines of the steps that are asked
for are parsed. A long run writes the events of some of its steps (`events.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.core.rulebook.run import RUN_HAS_EVENTS
from echelon.schedule.action import ActionKind
from echelon.telemetry.events import METRICS_FILE, START, STEP, events_files
from echelon.telemetry.json_lines import (
    LogEntry,
    last_of_each_step,
    os_error_text,
    read_entries,
    text_parts,
    unreadable_file_error,
)

ACTION_KINDS = frozenset(kind.value for kind in ActionKind)
LOAD = "load"
_SHOWN_RUNS = 4
"""Runs of neighbouring steps that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Hold what ranks wrote down in one step, each on its own clock. `start`: of the run."""

    number: int
    start: int
    events: Mapping[int, tuple[Event, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAttempt:
    """Say of a step that a run took: at which of its starts, and by which mark it is found.

    Runs of earlier versions have no marks: where events of one start end was not told apart.
    """

    number: int
    start: int
    mark: str | None


class RecordedSteps:
    """The steps that a run took, and where the events of some ranks in each are.

    A step that a resumed run took again counts once, as it was taken last.
    """

    def __init__(self, run_dir: Path, ranks: Sequence[int]) -> None:
        """Look through the files of `ranks`, which are there, for where steps begin and end."""
        self.taken = _last_attempts(run_dir)
        by_rank = {rank: _places_of_rank(run_dir, rank) for rank in ranks}
        self._found: dict[int, tuple[int, dict[int, _Place]]] = {}
        for step in self.taken:
            mark = step.mark
            if mark is not None and all(mark in places for places in by_rank.values()):
                places = {rank: by_rank[rank][mark] for rank in ranks}
                self._found[step.number] = step.start, places

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the steps of which all ranks have events, in rising order."""
        return tuple(self._found)

    def says(self) -> str:
        """Steps that have events: ``34 of 217: steps 1 to 8, 16, ..., 208, 217``."""
        there = f"{len(self._found)} of {len(self.taken)}"
        return f"{there}: {step_ranges(self.numbers)}" if self._found else there

    def read(self, number: int) -> RecordedStep:
        """Return a step of `numbers`; ConfigError where a line of it is no event."""
        start, places = self._found[number]
        events: dict[int, tuple[Event, ...]] = {}
        for rank, (path, begin, end) in places.items():
            lines = read_entries(path, begin, end)
            events[rank] = tuple(line.event(rank) for line in lines)
        return RecordedStep(number=number, start=start, events=events)


def no_events(run_dir: Path, why: str) -> ConfigError:
    """Return the error of a run whose events are not there."""
    suggestions = ["observe.events = true in a new run"]
    return ConfigError(
        RUN_HAS_EVENTS.problem(
            f"{run_dir} has {why}", key="observe.events", suggestions=suggestions
        )
    )


def step_ranges(numbers: Sequence[int]) -> str:
    """Return numbers in rising order as text: ``steps 1 to 8, 16, ..., 208, 217``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{first} to {last}" if first != last else f"{first}" for first, last in runs]
    if len(texts) > _SHOWN_RUNS:
        texts = [*texts[:2], "...", *texts[-2:]]
    return ("steps " if len(numbers) > 1 else "step ") + ", ".join(texts)


_Place = tuple[Path, int, int]
"""A file, and where a step begins and ends in it."""


def _places_of_rank(run_dir: Path, rank: int) -> dict[str, _Place]:
    """Return where each step of a rank is, by its mark."""
    places: dict[str, _Place] = {}
    for path in events_files(run_dir, rank):
        places |= {mark: (path, *ends) for mark, ends in _places(path).items()}
    return places


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Return where each step begins and ends in a file, by its mark."""
    places: dict[str, tuple[int, int]] = {}
    begin: int | None = None
    for kind, place, name in _landmarks(path):
        if kind == STEP and begin is not None:
            places[name] = (begin, place)
        # What was loaded before a start, and has no mark, was cut short by a kill.
        begin = place if kind == LOAD else None
    return places


def _landmarks(path: Path) -> list[tuple[str, int, str]]:
    """Return the kind, place and name of each whole line that is a start, a load or a mark."""
    found: list[tuple[str, int, str]] = []
    try:
        for part in text_parts(path):
            text = part.text
            for kind in (START, LOAD, STEP):
                head = b'{"kind":"%s","name":"' % kind.encode()
                place = text.find(head)
                while place >= 0:
                    begin = place + len(head)
                    line_end = text.find(b"\n", begin)
                    name = text[begin : max(begin, text.find(b'"', begin, line_end))]
                    # A line that begins so, not one that quotes it, and not half of one.
                    if line_end >= 0 and (place == 0 or text[place - 1 : place] == b"\n"):
                        found.append((kind, part.place + place, name.decode(errors="replace")))
                    place = text.find(head, begin)
    except OSError as error:
        raise unreadable_file_error(path, os_error_text(error)) from error
    return sorted(found, key=lambda landmark: landmark[1])


def _last_attempts(run_dir: Path) -> tuple[StepAttempt, ...]:
    """Return the steps of a run in rising order, each as it was taken the last time."""
    steps: list[LogEntry] = []
    starts: dict[int, int] = {}
    start = -1
    for entry in read_entries(run_dir / METRICS_FILE):
        kind = entry.text("kind")
        start += kind == START
        if kind == STEP:
            starts[entry.place] = start
            steps.append(entry)
    return tuple(
        StepAttempt(
            number=step.whole("step"),
            start=starts[step.place],
            mark=step.text("mark") if "mark" in step.values else None,
        )
        for step in last_of_each_step(steps)
    )
