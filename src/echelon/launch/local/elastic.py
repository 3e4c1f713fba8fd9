"""Let a job go on without some of its ranks: drop the one that is lost, and start it again.

The job must be made for it: nobody may wait for such a rank in a collective. Which ranks they are,
and with how few of them the job ends, is in `ElasticRanks`. An error that a rank raised itself ends
the job all the same, for it would raise it again.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from echelon.launch.context import LostRank
from echelon.launch.local.messages import ElasticRanks, RankJob
from echelon.launch.local.output import say_if_possible
from echelon.launch.local.rank_processes import RankProcesses
from echelon.launch.local.rank_status import RankStatus
from echelon.launch.root_cause import FaultKind, RankFault, rank_name

LOSSES = frozenset(
    {
        FaultKind.KILLED,
        FaultKind.EXITED,
        FaultKind.ABORTED,
        FaultKind.STOPPED,
        FaultKind.SILENT,
        FaultKind.CONNECTION,
    }
)
"""Faults of a process, not of what it computes: those that a job may go on after."""

ENDS_WITHIN_S = 10.0
"""Seconds that such ranks have to return when all others have."""


class ElasticWatch:
    """Decide for one job which faults it goes on after, and bring ranks back."""

    def __init__(
        self,
        processes: RankProcesses,
        job: RankJob,
        elastic: ElasticRanks,
        tell: Callable[[LostRank], None],
    ) -> None:
        """Start with all ranks there; `tell` is told of each that is lost."""
        self._processes, self._job, self._elastic, self._tell = processes, job, elastic, tell
        self._restarted: Counter[int] = Counter()
        self._begun = False
        self._others_returned_at: float | None = None

    def look(self, fault: RankFault | None, every: list[RankStatus]) -> RankFault | None:
        """Return the fault that ends the job, if any; a rank that it can go on without is dropped.

        A rank that is started again takes its place in `every`.
        """
        self._begun = self._begun or all(seen.joined for seen in every)
        if fault is None:
            self._drop_late(every)
        elif self._goes_on_after(fault, every):
            self._drop(every, fault.rank, fault.summary)
            return None
        return fault

    def _goes_on_after(self, fault: RankFault, every: Sequence[RankStatus]) -> bool:
        if fault.rank not in self._elastic.ranks or fault.kind not in LOSSES or not self._begun:
            return False
        there = sum(
            every[rank].joined and (every[rank].open or every[rank].returned)
            for rank in self._elastic.ranks
        )
        return there >= self._elastic.least

    def _drop_late(self, every: list[RankStatus]) -> None:
        """Drop who has not come back although nothing is left to come back to."""
        others = [one for one in every if one.process.rank not in self._elastic.ranks]
        if not all(one.returned for one in others):
            return
        now = time.monotonic()
        self._others_returned_at = self._others_returned_at or now
        if now - self._others_returned_at > ENDS_WITHIN_S:
            for seen in every:
                if seen.open and seen.attempt:
                    self._drop(every, seen.process.rank, "had not come back when the run ended")

    def _drop(self, every: list[RankStatus], rank: int, cause: str) -> None:
        """Go on without a rank, and start it again if that may be."""
        seen = every[rank]
        seen.process.signal(signal.SIGKILL)
        seen.dropped, seen.fault = True, None
        ended = self._others_returned_at is not None
        returns = not ended and self._restarted[rank] < self._elastic.restarts
        lost = LostRank(rank=rank, attempt=seen.attempt, cause=cause, returns=returns)
        self._tell(lost)
        there = sum(every[one].open for one in self._elastic.ranks)
        next_ = "it is started again" if returns else "it is not started again"
        say_if_possible(
            f"{rank_name(rank, seen.label)}: {cause}\nthe run goes on with {there} of "
            f"{len(self._elastic.ranks)} {self._elastic.called}; {next_}",
            sys.stderr,
        )
        for one in every:
            if one.process.rank not in self._elastic.ranks:
                one.process.send(lost)
        if returns:
            self._restarted[rank] += 1
            every[rank] = self._restart(seen)

    def _restart(self, seen: RankStatus) -> RankStatus:
        process, now = self._processes.respawn(seen.process.rank), time.monotonic()
        attempt = self._restarted[process.rank]
        process.send(replace(self._job, attempt=attempt, introduce=False))
        return RankStatus(
            process=process, label=seen.label, moved_at=now, heard_at=now, attempt=attempt
        )
