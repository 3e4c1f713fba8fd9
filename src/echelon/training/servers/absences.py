"""Which steps a worker missed that was lost: its rows of their global batches nobody read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echelon.core.plan import Plan
from echelon.launch.context import LostRank
from echelon.training.servers.members import Change

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
    returned: bool
    """Whether it was taken in again."""

    @property
    def num_steps(self) -> int:
        """Return how many steps it missed."""
        return max(0, self.last_step - self.first_step + 1)

    def rows(self, plan: Plan) -> tuple[int, int]:
        """Return the first and the last row of each global batch that it should have read."""
        share = plan.mathematics.global_sequences // plan.mesh.num_workers
        return self.worker * share, (self.worker + 1) * share - 1

    def says(self, plan: Plan) -> str:
        """Return what became of it."""
        then = f"back with step {self.last_step + 1}" if self.returned else "not back"
        if not self.num_steps:
            return f"worker {self.worker}: {self.cause}; {then}, no step missed"
        first, last = self.rows(plan)
        return (
            f"worker {self.worker}: {self.cause}; {then}; rows {first} to {last} of the batches of "
            f"steps {self.first_step} to {self.last_step} "
            f"({self.num_steps * (last - first + 1)} sequences) count nowhere"
        )


@dataclass(slots=True, kw_only=True)
class AbsenceLog:
    """Keep who was lost and who came back."""

    num_workers: int
    _changes: list[Change] = field(default_factory=list[Change])
    _untold: deque[tuple[float, Change]] = field(default_factory=deque[tuple[float, Change]])
    _lost_before: set[int] = field(default_factory=set[int])

    def note(self, change: Change) -> None:
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
        found: list[Absence] = []
        open_: dict[int, Change] = {}
        first: set[int] = set()
        for one in self._changes:
            if not one.there:
                open_[one.worker] = one
            elif one.worker in open_:
                found.append(_absence(open_.pop(one.worker), one.step, causes, returned=True))
            elif one.step > started and one.worker not in first:
                found.append(_never(one.worker, started, one.step, causes, returned=True))
            first.add(one.worker)
        for worker in sorted(set(range(self.num_workers)) - first):
            found.append(_never(worker, started, steps, causes, returned=False))
        found += [_absence(one, steps, causes, returned=False) for one in open_.values()]
        return found


def _causes(lost: Iterable[LostRank]) -> dict[tuple[int, int], str]:
    return {(one.rank, one.attempt): one.cause for one in lost}


def _absence(
    lost: Change, until: int, causes: dict[tuple[int, int], str], *, returned: bool
) -> Absence:
    return Absence(
        worker=lost.worker,
        cause=causes.get((lost.worker, lost.attempt), NOT_TOLD),
        first_step=lost.step + 1,
        last_step=until,
        returned=returned,
    )


def _never(
    worker: int, start: int, until: int, causes: dict[tuple[int, int], str], *, returned: bool
) -> Absence:
    """Return the absence of a worker that was lost before the first step."""
    return Absence(
        worker=worker,
        cause=causes.get((worker, 0), NOT_TOLD),
        first_step=start + 1,
        last_step=until,
        returned=returned,
    )
