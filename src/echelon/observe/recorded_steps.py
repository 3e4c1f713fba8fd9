"""Find single steps in the events of a run, without reading the rest of its files.

A rank loads the batch of a step and then runs its actions, so an event of kind "load" is where a
step begins. The files of a long run are large; they are searched for these lines as bytes, and only
the lines of the steps that are asked for are parsed. Which step it was, metrics.jsonl says: rank 0
writes a line there for every step, and one for every start of the run.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.core.rulebook.observe import EVENTS_READABLE
from echelon.core.serialize import from_json
from echelon.observe.events import START, events_path
from echelon.observe.json_lines import read_json_lines
from echelon.observe.observer import METRICS_FILE
from echelon.schedule.action import ActionKind

ACTION_KINDS = frozenset(kind.value for kind in ActionKind)
LOAD = "load"

Attempt = tuple[int, int]
"""A start of the run, and how many batches had been loaded since: both counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Hold what ranks wrote down in one step, each on its own clock. `start`: of the run."""

    number: int
    start: int
    events: Mapping[int, tuple[Event, ...]]


class RecordedSteps:
    """The steps of which every one of some ranks has events.

    A step that a resumed run took again counts once, as it was taken last.
    """

    def __init__(self, run_dir: Path, ranks: Sequence[int]) -> None:
        """Look through the files of `ranks`, which are there, for where steps begin."""
        self._run_dir = run_dir
        self._places = {rank: _places(events_path(run_dir, rank)) for rank in ranks}
        self._attempts = {
            number: attempt
            for number, attempt in _taken_last(run_dir).items()
            if all(attempt in places for places in self._places.values())
        }

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the steps, as step lines have them, in rising order."""
        return tuple(sorted(self._attempts))

    def read(self, number: int, *, num_actions: Mapping[int, int]) -> RecordedStep:
        """Return a step; `num_actions` says how many actions a rank runs in it.

        What follows the last action is read up to the next one: those of a validation are not part
        of the step. ConfigError where a line is no event.
        """
        attempt = self._attempts[number]
        events = {
            rank: tuple(self._step_of(rank, *places[attempt], num_actions=num_actions[rank]))
            for rank, places in self._places.items()
        }
        return RecordedStep(number=number, start=attempt[0], events=events)

    def _step_of(self, rank: int, begin: int, end: int, *, num_actions: int) -> Iterator[Event]:
        path, left = events_path(self._run_dir, rank), num_actions
        with path.open("rb") as file:
            file.seek(begin)
            while file.tell() < end:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                event = _event(line, path)
                if event.kind in ACTION_KINDS:
                    left -= 1
                if left < 0:
                    return
                yield event


def _event(line: bytes, path: Path) -> Event:
    try:
        return from_json(Event, json.loads(line))
    except ValueError as error:
        shown = line[:60].decode(errors="replace").strip()
        raise ConfigError(
            EVENTS_READABLE.problem(f"{path} has a line that is no event: {shown!r} ({error})")
        ) from error


def _places(path: Path) -> dict[Attempt, tuple[int, int]]:
    """Return where each step begins and ends in a file, in bytes."""
    places: dict[Attempt, tuple[int, int]] = {}
    start, loads = -1, 0
    marks = [*_marks(path), (START, path.stat().st_size)]
    for (kind, begin), (_, end) in pairwise(marks):
        if kind == START:
            start, loads = start + 1, 0
        else:
            places[start, loads] = (begin, end)
            loads += 1
    return places


def _marks(path: Path) -> list[tuple[str, int]]:
    """Return the kind and the place of each line that is a start or a load, in order."""
    if path.stat().st_size == 0:
        return []
    found: list[tuple[str, int]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for kind in (START, LOAD):
            mark = b'{"kind":"%s",' % kind.encode()
            place = text.find(mark)
            while place >= 0:
                # A line that begins so, not one that quotes it.
                if place == 0 or text[place - 1 : place] == b"\n":
                    found.append((kind, place))
                place = text.find(mark, place + 1)
    return sorted(found, key=lambda mark: mark[1])


def _taken_last(run_dir: Path) -> dict[int, Attempt]:
    """Return, for each step of a run, when it was taken the last time."""
    taken: dict[int, Attempt] = {}
    start, steps = -1, 0
    for entry in read_json_lines(run_dir / METRICS_FILE):
        if entry.get("kind") == START:
            start, steps = start + 1, 0
        elif entry.get("kind") == "step":
            number = int(entry["step"])
            while taken and next(reversed(taken)) >= number:
                taken.popitem()
            taken[number] = (start, steps)
            steps += 1
    return taken
