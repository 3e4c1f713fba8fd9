# SPDX-License-Identifier: Apache-2.0
"""Let a job go on without some of its islands: drop the one that is lost, and start it again.

The job must be made for it: no other island may wait for a rank of it in a collective. Which ranks
are lost together, and with how few islands the job ends, is in `ElasticRanks`. What we raise
ourselves of the run ends the job all the same.
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

OWN_FAULTS = frozenset({FaultKind.RAISED, FaultKind.STUCK, FaultKind.NEVER_JOINED})
"""Faults that an island may have by itself: others may not, with other samples."""

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
        self._lost: list[LostRank] = []
        self._others_returned_at: float | None = None

    def look(self, fault: RankFault | None, every: list[RankStatus]) -> RankFault | None:
        """Return the fault that ends the job, if any; an island that it can do without is dropped.

        Ranks that are started again take their places in `every`.
        """
        self._begun = self._begun or all(seen.joined for seen in every)
        if fault is None:
            self._drop_late(every)
        elif self._goes_on_after(fault, every):
            self._drop(every, fault.rank, fault.summary)
            return None
        return fault

    def _goes_on_after(self, fault: RankFault, every: Sequence[RankStatus]) -> bool:
        own = fault.kind in OWN_FAULTS and fault.error is None
        if not self._begun or not (own or fault.kind in LOSSES):
            return False
        there = sum(
            all(every[rank].joined and (every[rank].open or every[rank].returned) for rank in ranks)
            for ranks in self._elastic.islands
        )
        return there >= self._elastic.least

    def _drop_late(self, every: list[RankStatus]) -> None:
        """Drop who has not come back although nothing is left to come back to."""
        islands = self._elastic.islands
        if not any(all(every[rank].returned for rank in ranks) for ranks in islands):
            return
        now = time.monotonic()
        self._others_returned_at = self._others_returned_at or now
        if now - self._others_returned_at > ENDS_WITHIN_S:
            for seen in every:
                if seen.open and seen.attempt:
                    self._drop(every, seen.process.rank, "had not come back when the run ended")

    def _drop(self, every: list[RankStatus], rank: int, cause: str) -> None:
        """Go on without the island of a rank, and start it again if that may be."""
        elastic, seen = self._elastic, every[rank]
        island = elastic.island_of(rank)
        for one in island:
            every[one].process.signal(signal.SIGKILL)
            every[one].dropped, every[one].fault = True, None
        ended = self._others_returned_at is not None
        returns = not ended and self._restarted[island[0]] < elastic.restarts
        lost = LostRank(rank=rank, attempt=seen.attempt, cause=cause, returns=returns)
        self._lost.append(lost)
        self._tell(lost)
        there = sum(all(every[one].open for one in ranks) for ranks in elastic.islands)
        next_ = "it is started again" if returns else "it is not started again"
        say_if_possible(
            f"{rank_name(rank, seen.label)}: {cause}\n{elastic.name_of(rank)} is left out; the run "
            f"goes on with {there} of {len(elastic.islands)} islands; {next_}",
            sys.stderr,
        )
        for one in every:
            if one.process.rank not in island:
                one.process.send(lost)
        if returns:
            self._restarted[island[0]] += 1
            for one in island:
                every[one] = self._restart(every[one], self._restarted[island[0]])

    def _restart(self, seen: RankStatus, attempt: int) -> RankStatus:
        process, now = self._processes.respawn(seen.process.rank), time.monotonic()
        again = replace(self._job, attempt=attempt, introduce=False, lost=tuple(self._lost))
        process.send(again)
        return RankStatus(
            process=process, label=seen.label, moved_at=now, heard_at=now, attempt=attempt
        )
