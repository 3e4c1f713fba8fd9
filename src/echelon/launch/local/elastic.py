# SPDX-License-Identifier: Apache-2.0
"""Let a job go on without some of its ranks: drop the one that is lost, and start it again.

The job must be made for it: nobody may wait for such a rank in a collective. Which ranks they are,
which of them are lost together, and with how few of them the job ends, is in `ElasticRanks`. What
we raise ourselves of the run ends the job all the same; what else a rank raises does so where ranks
are lost one by one, for it would raise it again.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from echelon.launch.context import LostRank
from echelon.launch.local.elastic_ranks import ElasticRanks
from echelon.launch.local.messages import RankJob
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

HANGS = frozenset({FaultKind.RAISED, FaultKind.STUCK, FaultKind.NEVER_JOINED})
"""Faults that units of ranks may have by themselves: others may not, with other samples."""

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
        """Return the fault that ends the job, if any; a unit that it can go on without is dropped.

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
        if fault.rank not in self._elastic.ranks or not self._is_loss(fault) or not self._begun:
            return False
        there = sum(
            all(every[rank].joined and (every[rank].open or every[rank].returned) for rank in unit)
            for unit in self._elastic.units
        )
        return there >= self._elastic.least

    def _is_loss(self, fault: RankFault) -> bool:
        """Return whether others may go on after a fault: it is of a process, or of one unit."""
        own = self._elastic.apart and fault.kind in HANGS and fault.error is None
        return own or fault.kind in LOSSES

    def _drop_late(self, every: list[RankStatus]) -> None:
        """Drop who has not come back although nothing is left to come back to."""
        others = [one for one in every if one.process.rank not in self._elastic.ranks]
        ended = any(all(every[rank].returned for rank in unit) for unit in self._elastic.units)
        if not (all(one.returned for one in others) if others else ended):
            return
        now = time.monotonic()
        self._others_returned_at = self._others_returned_at or now
        if now - self._others_returned_at > ENDS_WITHIN_S:
            for seen in every:
                if seen.open and seen.attempt:
                    self._drop(every, seen.process.rank, "had not come back when the run ended")

    def _drop(self, every: list[RankStatus], rank: int, cause: str) -> None:
        """Go on without the unit of a rank, and start it again if that may be."""
        elastic, seen = self._elastic, every[rank]
        unit = elastic.unit_of(rank)
        for one in unit:
            every[one].process.signal(signal.SIGKILL)
            every[one].dropped, every[one].fault = True, None
        ended = self._others_returned_at is not None
        returns = not ended and self._restarted[unit[0]] < elastic.restarts
        lost = LostRank(rank=rank, attempt=seen.attempt, cause=cause, returns=returns)
        self._lost.append(lost)
        self._tell(lost)
        there = sum(all(every[one].open for one in ranks) for ranks in elastic.units)
        next_ = "it is started again" if returns else "it is not started again"
        out = f"{elastic.called_of(rank)} is left out; " if elastic.apart else ""
        say_if_possible(
            f"{rank_name(rank, seen.label)}: {cause}\n{out}the run goes on with {there} of "
            f"{len(elastic.units)} {elastic.called}; {next_}",
            sys.stderr,
        )
        for one in every:
            if one.process.rank not in (unit if elastic.apart else elastic.ranks):
                one.process.send(lost)
        if returns:
            self._restarted[unit[0]] += 1
            for one in unit:
                every[one] = self._restart(every[one], self._restarted[unit[0]])

    def _restart(self, seen: RankStatus, attempt: int) -> RankStatus:
        process, now = self._processes.respawn(seen.process.rank), time.monotonic()
        again = replace(self._job, attempt=attempt, introduce=False, lost=tuple(self._lost))
        process.send(again)
        return RankStatus(
            process=process, label=seen.label, moved_at=now, heard_at=now, attempt=attempt
        )
