# SPDX-License-Identifier: Apache-2.0
"""The process of one mirror: `python -m echelon.telemetry.trackers.worker RUN TOOL PROJECT`.

It follows the run until its standard input ends, mirrors what is left, and ends with 0. What goes
wrong is printed and ends it with 1; whoever started it may start it again.

The tracker says what it has where it can, so a mirror that was killed between writing and noting
writes nothing twice. Steps that are taken again after they were mirrored are undone: a tracker that
can forget does so, and another one gets a new run (NAME-2) that holds the whole history as it is
now; the earlier run stays as it was.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.core.choices.registry import load_reference
from echelon.core.choices.trackers import TRACKERS
from echelon.core.errors import EchelonError
from echelon.telemetry.events import STEP
from echelon.telemetry.trackers.progress import (
    MirrorProgress,
    mirrored_alone,
    read_progress,
    write_progress,
)
from echelon.telemetry.trackers.tracker import (
    MetricsReader,
    Point,
    TrackedRun,
    Tracker,
    as_taken_last,
    config_of,
    tracker_folder,
)

FAILED = "the mirror failed: "
"""How the line begins that says why a mirror ended, among whatever else a package prints."""
_LOOK_S = 1.0  # s between two looks

_BATCH = 500
"""Points between two notes of how far the mirror got."""


def mirror_until_end(mirror: Mirror, ended: int) -> None:
    """Mirror what a run adds, until the pipe `ended` ends and nothing new is there."""
    final = False
    while True:
        new = mirror.look(final=final)
        if final and not new:
            mirror.close()
            return
        if not final and select.select([ended], [], [], 0.0 if new else _LOOK_S)[0]:
            final = not os.read(ended, 4096)


def main(arguments: list[str]) -> int:
    """Mirror one run in one tracker; return the exit status."""
    run, tracker, project = Path(arguments[0]), arguments[1], arguments[2]
    try:
        with mirrored_alone(run, tracker):
            mirror_until_end(Mirror(run, tracker, project), sys.stdin.fileno())
    except Exception as error:  # Whatever a tracker's package raises.
        if not isinstance(error, EchelonError):
            traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{FAILED}{said}", file=sys.stderr, flush=True)
        return 1
    return 0


def new_tracker(name: str) -> Tracker:
    """Return what writes to a tracker; ImportError, or anything its package raises."""
    return load_reference(TRACKERS[name].runner)()


class Mirror:
    """Mirror one run in one tracker."""

    def __init__(
        self, run: Path, name: str, project: str, make: Callable[[str], Tracker] = new_tracker
    ) -> None:
        """Read how far an earlier mirror got; the tracker is opened when there is a point."""
        self.run, self.name, self._make = run, name, make
        self._progress = read_progress(run, name) or MirrorProgress(project=project)
        self._reader = MetricsReader(run)
        self._tracker: Tracker | None = None
        self._config: Mapping[str, object] = {}
        self._last_step = 0
        """The largest step that the tracker has."""

    @property
    def lines(self) -> int:
        """Return the last line of the metrics that is in the tracker."""
        return self._progress.lines

    def look(self, *, final: bool) -> int:
        """Mirror what is new, and return how many lines that were."""
        points = self._reader.look(final=final)
        if not points:
            return 0
        self._add(as_taken_last(self._open(points) if self._tracker is None else points))
        return len(points)

    def close(self) -> None:
        """Let go of the tracker."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _open(self, points: Sequence[Point]) -> Sequence[Point]:
        """Begin, or go on, and return which of these points, the first ones, the tracker lacks."""
        self._config = config_of(self.run)
        self._tracker = tracker = self._begin()
        found = tracker.recorded()
        has = self.lines if found is None else found
        if not has:
            self._progress = replace(self._progress, replayed=points[-1].number)
        given = max(has, self._progress.replayed)
        known = as_taken_last(one for one in points if one.number <= given)
        known = [one for one in known if one.number <= has]
        self._last_step = max((one.step for one in known), default=0)
        steps = [one for one in known if one.kind == STEP]
        if found is None and tracker.rewinds and steps:
            # What was written after the last note is not known: the last step comes again.
            has = steps[-1].number - 1
            tracker.rewind(steps[-1].step)
            self._last_step = steps[-1].step - 1
        self._note(lines=has)
        return [one for one in points if one.number > has]

    def _begin(self) -> Tracker:
        tracker = self._make(self.name)
        found = tracker.open(
            TrackedRun(
                folder=tracker_folder(self.run, self.name),
                project=self._progress.project,
                group=self.run.resolve().name,
                revision=self._progress.revision,
                id=self._progress.id,
                config=self._config,
            )
        )
        if found != self._progress.id:
            self._note(id=found)
        return tracker

    def _add(self, points: Sequence[Point]) -> None:
        assert self._tracker is not None, "it was opened"
        again = min((p.step for p in points if p.kind == STEP), default=self._last_step + 1)
        if again <= self._last_step:
            points = self._undo(again, points)
        for start in range(0, len(points), _BATCH):
            batch = points[start : start + _BATCH]
            self._tracker.write([one for one in batch if not one.is_empty])
            self._last_step = max(self._last_step, *(one.step for one in batch))
            self._note(lines=batch[-1].number)

    def _undo(self, step: int, points: Sequence[Point]) -> Sequence[Point]:
        """Undo what the tracker has from `step` on, and return the points that it lacks then."""
        assert self._tracker is not None, "it was opened"
        self._last_step = step - 1
        if self._tracker.rewinds:
            self._tracker.rewind(step)
            return points
        self._tracker.close()
        earlier = self._progress
        self._progress = replace(
            earlier, id="", revision=earlier.revision + 1, lines=0, replayed=points[-1].number
        )
        self._tracker = self._begin()
        everything = MetricsReader(self.run).look(final=True)
        return as_taken_last(one for one in everything if one.number <= points[-1].number)

    def _note(self, *, lines: int | None = None, id: str | None = None) -> None:
        self._progress = replace(
            self._progress,
            lines=self._progress.lines if lines is None else lines,
            id=self._progress.id if id is None else id,
        )
        write_progress(self.run, self.name, self._progress)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
