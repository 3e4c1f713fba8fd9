# SPDX-License-Identifier: Apache-2.0
"""Which steps a worker missed that was lost: its rows of their global batches nobody read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echelon.core.choices.updates import WorkerChange
from echelon.launch.context import LostRank

NOT_TOLD = "its connection broke"

CAUSE_WITHIN_S = 3.0
"""Seconds in which whoever watches the processes says how one was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Say that a worker was lost, and what that left out."""

    worker: int
    """The worker."""
    cause: str
    """How it was lost."""
    first_step: int
    """The first step, from 1, whose gradient of this worker counts nowhere."""
    last_step: int
    """The last one; less than the first where it missed none."""
    first_row: int
    """The first row, from 0, of each of their global batches that it would have read."""
    last_row: int
    """The last one."""
    returned: bool
    """Whether it was taken in again."""

    @property
    def num_steps(self) -> int:
        """Return how many steps it missed."""
        return max(0, self.last_step - self.first_step + 1)

    @property
    def num_sequences(self) -> int:
        """Return how many sequences count nowhere."""
        return self.num_steps * (self.last_row - self.first_row + 1)

    def says(self) -> str:
        """Return what became of it."""
        then = f"back with step {self.last_step + 1}" if self.returned else "not back"
        if not self.num_steps:
            return f"worker {self.worker}: {self.cause}; {then}, no step missed"
        return (
            f"worker {self.worker}: {self.cause}; {then}; its {self.num_sequences} sequences of "
            f"steps {self.first_step} to {self.last_step} (rows {self.first_row} to "
            f"{self.last_row} of each batch) count nowhere"
        )


_Untold = tuple[float, WorkerChange]
"""When a change was noted, and which."""


@dataclass(slots=True, kw_only=True)
class AbsenceLog:
    """Keep who was lost and who came back."""

    num_workers: int
    """Workers of a run that lost none."""
    share: int
    """Rows of each global batch that each of them reads."""
    _changes: list[WorkerChange] = field(default_factory=list[WorkerChange])
    _untold: deque[tuple[float, WorkerChange]] = field(
        default_factory=deque[tuple[float, WorkerChange]]
    )
    _lost_before: set[int] = field(default_factory=set[int])

    def note(self, change: WorkerChange) -> None:
        """Take one change; those of a worker come in their order."""
        self._changes.append(change)
        self._untold.append((time.monotonic(), change))

    def news(self, lost: Iterable[LostRank]) -> Sequence[str]:
        """Return what to tell of the changes since the last time.

        A loss is told with its cause, which may come a moment later than the loss itself.
        """
        causes, found = _causes(lost), list[str]()
        while self._untold:
            since, one = self._untold[0]
            cause = causes.get((one.worker, one.attempt))
            if not one.there and cause is None and time.monotonic() - since < CAUSE_WITHIN_S:
                break
            self._untold.popleft()
            if not one.there:
                self._lost_before.add(one.worker)
                done = f"after {one.step} steps: {cause or NOT_TOLD}"
                found.append(f"worker {one.worker} is lost {done}")
            elif one.worker in self._lost_before or one.attempt:
                found.append(f"worker {one.worker} is back, and begins with step {one.step + 1}")
        return found

    def told(self, steps: int, lost: Iterable[LostRank]) -> Sequence[Absence]:
        """Return the absences in a run that ended after `steps` steps, in the order of losses."""
        causes = _causes(lost)
        started = min((one.step for one in self._changes if one.there), default=0)
        # Who was never there is lost before the first step.
        away: dict[int, tuple[int, int]] = {
            worker: (0, started) for worker in range(self.num_workers)
        }
        found: list[Absence] = []
        for one in self._changes:
            if not one.there:
                away[one.worker] = (one.attempt, one.step)
                continue
            attempt, since = away.pop(one.worker)
            if since < one.step or attempt < one.attempt:
                cause = causes.get((one.worker, attempt), NOT_TOLD)
                found.append(self._absence(one.worker, cause, since, one.step, returned=True))
        for worker, (attempt, since) in away.items():
            cause = causes.get((worker, attempt), NOT_TOLD)
            found.append(self._absence(worker, cause, since, steps, returned=False))
        return sorted(found, key=lambda one: (one.first_step, one.worker))

    def _absence(
        self, worker: int, cause: str, since: int, until: int, *, returned: bool
    ) -> Absence:
        return Absence(
            worker=worker,
            cause=cause,
            first_step=since + 1,
            last_step=until,
            first_row=worker * self.share,
            last_row=(worker + 1) * self.share - 1,
            returned=returned,
        )


def _causes(lost: Iterable[LostRank]) -> dict[tuple[int, int], str]:
    return {(one.rank, one.attempt): one.cause for one in lost}
