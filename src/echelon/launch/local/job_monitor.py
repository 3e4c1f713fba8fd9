# SPDX-License-Identifier: Apache-2.0
"""Watch the ranks of one job until all have returned, or say which one failed first.

A job may go on without some of its islands: the one that is lost is dropped, and started again. The
job must be made for it: no other island may wait for a rank of it in a collective. Which ranks are
lost together, and with how few islands the job ends, is in `ElasticRanks`. What we raise ourselves
of the run ends the job all the same.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from echelon.launch.context import COMPILING, LostRank
from echelon.launch.local.desync_watch import DesyncWatch, MeetingWatch, note_of, where_lost
from echelon.launch.local.messages import (
    ElasticRanks,
    ExitRequest,
    Heartbeat,
    JobResult,
    Limits,
    Notice,
    RankJob,
    ThreadStacks,
)
from echelon.launch.local.output import say_if_possible
from echelon.launch.local.rank_processes import RankProcesses
from echelon.launch.local.rank_status import (
    TAIL_LINES,
    RankStatus,
    exit_fault,
    known_of,
    new_fault,
    turn_of,
    wait_of,
)
from echelon.launch.root_cause import (
    CANNOT_END,
    FaultKind,
    RankFailure,
    RankFault,
    find_root_cause,
    rank_name,
    settle_s,
)

_POLL_S = 0.2
_CHECK_S = 0.4
_ASK_S = 1.0
_SUSPENDED_S = 2.0
_STACK_S = 2.0
_STALE_S = 10.0
_GRACE_S = 1.0
_UNREACHABLE_S = 5.0

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


def run_job(
    processes: RankProcesses,
    job: RankJob,
    each_poll: Callable[[bool], None] = lambda _: None,
    tell_lost: Callable[[LostRank], None] = lambda _: None,
) -> list[object]:
    """Return what the first ranks of `processes` return from `job`; see `JobMonitor.results`.

    `tell_lost` is told of each rank that is lost and without which the job goes on.
    """
    ranks = processes.ranks[: job.world_size]
    for process in ranks:
        process.send(job)
    desync = None
    if job.rings and job.limits.desync_s is not None:
        folder, after_s = Path(job.rings), job.limits.desync_s
        desync = DesyncWatch(folder, job.number, job.world_size, after_s)
    try:
        monitor = JobMonitor(processes, job.labels, job.limits, desync)
        if job.elastic is not None:
            monitor.elastic = ElasticWatch(processes, job, job.elastic, tell_lost)
        results = monitor.results(each_poll)
    finally:
        if desync is not None:
            desync.close()
    for process in processes.ranks[: job.world_size]:
        process.send(Notice.LEAVE_GROUP)
    return results


class JobMonitor:
    """Watch the first `len(labels)` ranks of `processes` through one job that was just sent."""

    def __init__(
        self,
        processes: RankProcesses,
        labels: Sequence[str],
        limits: Limits,
        desync: DesyncWatch | None = None,
    ) -> None:
        """Start all clocks now; `desync` compares the fingerprints that the ranks leave."""
        now = time.monotonic()
        self._processes = processes
        self._limits, self._desync = limits, desync
        self.elastic: ElasticWatch | None = None
        self._began = self._polled_at = self._checked_at = self._asked_at = now
        self._meetings = MeetingWatch(limits.still_s) if limits.still_s is not None else None
        self._seen = [
            RankStatus(process=process, label=label, moved_at=now, heard_at=now)
            for process, label in zip(processes.ranks, labels, strict=False)
        ]

    def results(self, each_poll: Callable[[bool], None] = lambda _: None) -> list[object]:
        """Return what the ranks returned; RankFailure names the one that failed first.

        After a failure every rank has ended. `each_poll` runs several times a second; its argument
        is True once a rank answers a request to stop with a result.
        """
        while True:
            self._read_messages()
            each_poll(any(seen.answers_stop for seen in self._seen))
            for seen in self._seen:
                self._look_at(seen)
            if time.monotonic() - self._checked_at > _CHECK_S:
                self._checked_at = time.monotonic()
                for seen in self._seen:
                    self._look_for_stop(seen)
                self._look_for_desync()
                self._look_for_stuck()
                self._look_for_meetings()
            fault = self._settled()
            if self.elastic is not None:
                if fault is not None:
                    # Ranks may have joined after the reading above and before this death.
                    self._read_messages()
                fault = self.elastic.look(fault, self._seen)
            if fault is not None:
                raise self._end(fault)
            if all(seen.returned or seen.dropped for seen in self._seen):
                return [seen.value for seen in self._seen]

    def _read_messages(self) -> None:
        for process, message in self._processes.listen(_POLL_S, len(self._seen)):
            seen = self._seen[process.rank]
            if not seen.dropped:
                self._take(seen, message)
        now = time.monotonic()
        asleep = now - self._polled_at
        if asleep > _SUSPENDED_S:
            # We were stopped ourselves (Ctrl-Z, a laptop's lid), perhaps with the ranks.
            self._began += asleep
            for seen in self._seen:
                seen.moved_at += asleep
                seen.heard_at += asleep
                seen.stopped_since = seen.asked_at = None
        elif any(seen.open and seen.heartbeat.doing == COMPILING for seen in self._seen):
            self._began += asleep  # what a compiler takes is no time of the job
        self._polled_at = now

    def _take(self, seen: RankStatus, message: object) -> None:
        now = time.monotonic()
        seen.heard_at = now
        match message:
            case Heartbeat():
                if message.count != seen.heartbeat.count:
                    seen.moved_at = now
                seen.heartbeat = message
            case Notice.GROUP_JOINED:
                seen.joined = True
                seen.moved_at = now
            case Notice.ANSWERS_STOP:
                seen.answers_stop = True
            case JobResult(value=value):
                seen.returned = True
                seen.value = value
            case RankFault():
                seen.fault = message
            case ThreadStacks():
                seen.stack = message
            case _:
                raise AssertionError(f"no supervisor knows the message {message!r}")

    def _look_at(self, seen: RankStatus) -> None:
        """Note the exit of one rank."""
        now = time.monotonic()
        if seen.fault is not None or seen.dropped:
            return
        if seen.process.exit_code is not None:
            seen.fault = exit_fault(seen, seen.process.exit_code, now)
        elif seen.process.send_failed:
            seen.deaf_since = seen.deaf_since or now
            if now - seen.deaf_since > _UNREACHABLE_S:
                seen.fault = new_fault(seen, FaultKind.EXITED, now, "closed its channel")

    def _look_for_stop(self, seen: RankStatus) -> None:
        """Note that one rank is stopped or silent."""
        now = time.monotonic()
        if seen.fault is not None or seen.dropped:
            return
        wrong = seen.missed(
            now,
            stopped=seen.process.stopped(),
            stopped_s=self._limits.stopped_s,
            silent_s=self._limits.silent_s if seen.open else inf,
        )
        if wrong is not None:
            kind, what = wrong
            detail = self._dump(seen) if kind is FaultKind.SILENT else ""
            seen.fault = new_fault(seen, kind, now, what + seen.place, detail)

    def _settled(self) -> RankFault | None:
        """Return the fault that explains all others, once nothing better can come."""
        best = self._heaviest()
        if best is None or self._desync is None:
            return best
        return self._desync.explained(best, [known_of(seen) for seen in self._seen])

    def _heaviest(self) -> RankFault | None:
        faults = [seen.fault for seen in self._seen if seen.fault is not None]
        if not faults:
            return None
        best = find_root_cause(faults)
        now = time.monotonic()
        if now - best.at < settle_s(best) and any(seen.open for seen in self._seen):
            return None
        if best.kind is not FaultKind.CONNECTION or "time" not in best.summary.lower():
            return best
        # Somebody waited in vain, and nobody is dead or stopped: who is not waiting?
        late = [seen for seen in self._seen if seen.open]
        if late and not self._know_stacks(late):
            return None
        busy = [seen for seen in late if not wait_of(seen)]
        return self._stuck(min(busy, key=lambda seen: seen.heartbeat.count)) if busy else best

    def _look_for_stuck(self) -> None:
        """Find a rank that has not moved for too long while it waits for nobody."""
        if any(seen.fault is not None for seen in self._seen):
            return
        now = time.monotonic()
        job_s = self._limits.job_s
        overdue = job_s is not None and now - self._began > job_s
        late: list[RankStatus] = []
        for seen in self._seen:
            limit = self._limits.step_s if seen.joined else self._limits.join_s
            if seen.open and (overdue or now - seen.moved_at > limit):
                late.append(seen)
            else:
                seen.asked_at = None
        if not late or not self._know_stacks(late):
            return
        busy = [seen for seen in late if not wait_of(seen)]
        if busy:
            seen = min(busy, key=lambda seen: (seen.heartbeat.count, seen.moved_at))
            seen.fault = self._stuck(seen)
        elif len(late) == sum(seen.open for seen in self._seen):
            seen = min(late, key=lambda seen: (turn_of(seen), seen.heartbeat.count, seen.moved_at))
            seen.fault = self._stuck(seen)

    def _look_for_desync(self) -> None:
        """Compare fingerprints; say what time may mend, and note as a fault what it cannot."""
        if self._desync is None or any(seen.fault is not None for seen in self._seen):
            return
        if self._desync.wants_stacks(time.monotonic()):
            for seen in self._seen:
                if seen.open:
                    seen.stack = None
                    seen.process.send(Notice.TELL_STACKS)
        found = self._desync.look([known_of(seen) for seen in self._seen])
        if found is None:
            return
        fault, certain = found
        seen = self._seen[fault.rank]
        if certain:
            seen.fault = fault
        else:
            if seen.open and seen.stack is None:
                fault = replace(fault, detail=f"{fault.detail}\n{self._dump(seen)}".rstrip())
            say_if_possible(note_of(fault, seen.label, self._limits.step_s), sys.stderr)

    def _look_for_meetings(self) -> None:
        """Find a rank that others wait for in vain, while nothing in the whole job moves."""
        faulty = any(seen.fault is not None for seen in self._seen)
        if self._meetings is None or faulty or not all(seen.joined for seen in self._seen):
            return
        now = time.monotonic()
        if now - self._asked_at > _ASK_S:
            self._asked_at = now
            for seen in self._seen:
                if seen.open:
                    seen.process.send(Notice.TELL_STACKS)
        fault = self._meetings.look([known_of(seen) for seen in self._seen])
        if fault is not None:
            self._seen[fault.rank].fault = fault

    def _know_stacks(self, late: list[RankStatus]) -> bool:
        """Ask for stacks; return whether all have answered or had the time to."""
        now = time.monotonic()
        for seen in late:
            if seen.asked_at is None or now - seen.asked_at > _STALE_S:
                seen.asked_at, seen.stack, seen.dumped = now, None, False
                seen.process.send(Notice.TELL_STACKS)
            elif seen.stack is None and not seen.dumped and now - seen.asked_at > _STACK_S:
                seen.dumped = True
                seen.process.signal(signal.SIGUSR2)
        return all(
            seen.stack is not None or now - (seen.asked_at or now) > 1.5 * _STACK_S for seen in late
        )

    def _stuck(self, seen: RankStatus) -> RankFault:
        now = time.monotonic()
        quiet_s = now - seen.moved_at
        if not seen.joined:
            kind, what = FaultKind.NEVER_JOINED, f"has not joined after {quiet_s:.0f} s"
        elif self._limits.job_s is not None and quiet_s < min(self._limits.job_s / 2, 5.0):
            kind, what = FaultKind.TIMED_OUT, f"did not end in {self._limits.job_s:g} s"
        else:
            kind, what = FaultKind.STUCK, f"has not moved for {quiet_s:.0f} s"
        if seen.stack is not None and wait_of(seen):
            what += f", and neither has any other rank: it waits in {wait_of(seen)}"
        detail = seen.stack.text if seen.stack is not None else self._dump(seen)
        return new_fault(seen, kind, now, what + seen.place, detail)

    def _dump(self, seen: RankStatus) -> str:
        if not seen.dumped:
            seen.dumped = True
            seen.process.signal(signal.SIGUSR2)
            time.sleep(_GRACE_S / 2)
        return "the end of its log:\n" + seen.process.log_tail(most_lines=TAIL_LINES)

    def _places_of_others(self) -> str:
        lost = [
            f"  {rank_name(seen.process.rank, seen.label)} was in {where_lost(seen.fault)}"
            for seen in self._seen
            if seen.fault is not None and seen.fault.kind is FaultKind.CONNECTION
        ]
        return "\n".join(lost)

    def _end(self, fault: RankFault) -> RankFailure:
        label = self._seen[fault.rank].label
        if fault.kind is FaultKind.NEVER_MET and not fault.detail:
            fault = replace(fault, detail=self._places_of_others())
        failure = RankFailure(fault, label)
        for seen in self._seen:
            if seen.process.rank == fault.rank and fault.kind in CANNOT_END:
                seen.process.signal(signal.SIGKILL)
            elif seen.process.rank == fault.rank:
                seen.process.send(ExitRequest(f"{failure.who} failed first"))
            else:
                name = rank_name(seen.process.rank, seen.label)
                seen.process.send(ExitRequest(f"{name} stops for {failure.who}: {fault.summary}"))
        for process in self._processes.ranks[len(self._seen) :]:
            process.signal(signal.SIGKILL)
        self._processes.discard(after_s=_GRACE_S)
        return failure


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
