"""Watch the ranks of one job until all have returned, or say which one failed first."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echelon.launch.crew import Crew, RankProcess
from echelon.launch.culprit import Fault, FaultKind, RankFailure, first_fault, rank_name, settle_s
from echelon.launch.messages import Beat, End, Joined, Raised, Returned, ShowStack, Stack

_POLL_S = 0.2
_CHECK_S = 0.4
_ASLEEP_S = 2.0
_STACK_S = 2.0
_STALE_S = 10.0
_GRACE_S = 1.0
_LOST_S = 5.0
_TAIL_LINES = 25
_MAPPED_FILE = (
    "a file that it reads as memory, of zero.offload_dir or of the data, was cut short or its disk "
    "failed"
)
_CANNOT_END = (FaultKind.STOPPED, FaultKind.SILENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Say how long a rank may be quiet before the run is ended, in seconds.

    A stopped process is found by its state (`stopped_s`), long before any time limit. `silent_s`
    is for a process that runs but whose interpreter is held; `step_s` for a main thread that does
    not move although the process lives; `job_s` bounds the whole job where it is given.
    """

    stopped_s: float = 3.0
    silent_s: float = 60.0
    join_s: float = 60.0
    step_s: float = 300.0
    job_s: float | None = None

    @property
    def rendezvous_s(self) -> float:
        """Return the timeout of joining: we want to find the missing rank before the others do."""
        return self.join_s + 10.0

    @property
    def collective_s(self) -> float:
        """Return the timeout of collectives: we want to find a stuck rank before torch does."""
        return max(self.step_s, self.join_s) + 30.0


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Hold what is known of one rank."""

    process: RankProcess
    label: str
    moved_at: float
    heard_at: float
    joined: bool = False
    returned: bool = False
    value: object = None
    beat: Beat = field(default_factory=lambda: Beat(count=-1, doing="", waiting=""))
    stopped_since: float | None = None
    deaf_since: float | None = None
    asked_at: float | None = None
    dumped: bool = False
    stack: Stack | None = None
    fault: Fault | None = None

    @property
    def open(self) -> bool:
        """Return whether the rank still works, as far as is known."""
        return not self.returned and self.fault is None

    @property
    def place(self) -> str:
        """Return what the rank was last doing, as an ending of a sentence."""
        return f", last heard of at {self.beat.doing}" if self.beat.doing else ""


class Watch:
    """Watch the first `len(labels)` ranks of `crew` through one job that was just sent."""

    def __init__(self, crew: Crew, labels: Sequence[str], limits: Limits) -> None:
        """Start all clocks now."""
        now = time.monotonic()
        self._crew = crew
        self._limits = limits
        self._began = self._polled_at = self._checked_at = now
        self._seen = [
            _Seen(process=process, label=label, moved_at=now, heard_at=now)
            for process, label in zip(crew.ranks, labels, strict=False)
        ]

    def results(self, each_poll: Callable[[], None] = lambda: None) -> list[object]:
        """Return what the ranks returned; RankFailure names the one that failed first.

        After a failure every rank of the crew has ended. `each_poll` runs several times a second.
        """
        while True:
            self._hear()
            each_poll()
            for seen in self._seen:
                self._look_at(seen)
            if time.monotonic() - self._checked_at > _CHECK_S:
                self._checked_at = time.monotonic()
                for seen in self._seen:
                    self._look_for_stop(seen)
                self._look_for_stuck()
            fault = self._settled()
            if fault is not None:
                raise self._end(fault)
            if all(seen.returned for seen in self._seen):
                return [seen.value for seen in self._seen]

    def _hear(self) -> None:
        for process, message in self._crew.listen(_POLL_S, len(self._seen)):
            self._take(self._seen[process.rank], message)
        now = time.monotonic()
        asleep = now - self._polled_at
        if asleep > _ASLEEP_S:
            # We were stopped ourselves (Ctrl-Z, a laptop's lid), perhaps with the ranks.
            self._began += asleep
            for seen in self._seen:
                seen.moved_at += asleep
                seen.heard_at += asleep
                seen.stopped_since = seen.asked_at = None
        self._polled_at = now

    def _take(self, seen: _Seen, message: object) -> None:
        now = time.monotonic()
        seen.heard_at = now
        match message:
            case Beat():
                if message.count != seen.beat.count:
                    seen.moved_at = now
                seen.beat = message
            case Joined():
                seen.joined = True
                seen.moved_at = now
            case Returned(value=value):
                seen.returned = True
                seen.value = value
            case Raised():
                kind = FaultKind.CONNECTION if message.connection else FaultKind.RAISED
                seen.fault = Fault(
                    rank=seen.process.rank,
                    kind=kind,
                    at=message.at,
                    summary=message.summary,
                    detail=message.traceback,
                    error=message.error,
                )
            case Stack():
                seen.stack = message
            case _:
                raise AssertionError(f"no supervisor knows the message {message!r}")

    def _look_at(self, seen: _Seen) -> None:
        """Note the exit of one rank."""
        now = time.monotonic()
        if seen.fault is not None:
            return
        code = seen.process.exit_code
        if code is not None:
            seen.fault = _exit_fault(seen, code, now)
        elif seen.process.deaf:
            seen.deaf_since = seen.deaf_since or now
            if now - seen.deaf_since > _LOST_S:
                seen.fault = _fault(seen, FaultKind.EXITED, now, "closed its channel")

    def _look_for_stop(self, seen: _Seen) -> None:
        """Note that one rank is stopped or silent."""
        now = time.monotonic()
        if seen.fault is not None:
            return
        if seen.process.stopped():
            seen.stopped_since = seen.stopped_since or now
            if now - seen.stopped_since >= self._limits.stopped_s:
                seen.fault = _fault(
                    seen, FaultKind.STOPPED, now, f"is stopped (SIGSTOP){seen.place}"
                )
        else:
            seen.stopped_since = None
            if seen.open and now - seen.heard_at > self._limits.silent_s:
                quiet = f"has said nothing for {self._limits.silent_s:g} s{seen.place}"
                seen.fault = _fault(seen, FaultKind.SILENT, now, quiet, self._dump(seen))

    def _settled(self) -> Fault | None:
        """Return the fault that explains all others, once nothing better can come."""
        faults = [seen.fault for seen in self._seen if seen.fault is not None]
        if not faults:
            return None
        best = first_fault(faults)
        now = time.monotonic()
        if now - best.at < settle_s(best) and any(seen.open for seen in self._seen):
            return None
        if best.kind is not FaultKind.CONNECTION or "time" not in best.summary.lower():
            return best
        # Somebody waited in vain, and nobody is dead or stopped: who is not waiting?
        late = [seen for seen in self._seen if seen.open]
        if late and not self._know_stacks(late):
            return None
        busy = [seen for seen in late if not _waits(seen)]
        return self._stuck(min(busy, key=lambda seen: seen.beat.count)) if busy else best

    def _look_for_stuck(self) -> None:
        """Find a rank that has not moved for too long while it waits for nobody."""
        if any(seen.fault is not None for seen in self._seen):
            return
        now = time.monotonic()
        job_s = self._limits.job_s
        overdue = job_s is not None and now - self._began > job_s
        late = [seen for seen in self._seen if seen.open and (overdue or self._late(seen, now))]
        for seen in self._seen:
            if seen not in late:
                seen.asked_at = None
        if not late or not self._know_stacks(late):
            return
        busy = [seen for seen in late if not _waits(seen)]
        if busy:
            seen = min(busy, key=lambda seen: (seen.beat.count, seen.moved_at))
            seen.fault = self._stuck(seen)
        elif len(late) == sum(seen.open for seen in self._seen):
            seen = min(late, key=lambda seen: (_turn(seen), seen.beat.count, seen.moved_at))
            seen.fault = self._stuck(seen)

    def _late(self, seen: _Seen, now: float) -> bool:
        limit = self._limits.step_s if seen.joined else self._limits.join_s
        return now - seen.moved_at > limit

    def _know_stacks(self, late: list[_Seen]) -> bool:
        """Ask for stacks; return whether all have answered or had the time to."""
        now = time.monotonic()
        for seen in late:
            if seen.asked_at is None or now - seen.asked_at > _STALE_S:
                seen.asked_at, seen.stack, seen.dumped = now, None, False
                seen.process.send(ShowStack())
            elif seen.stack is None and not seen.dumped and now - seen.asked_at > _STACK_S:
                seen.dumped = True
                seen.process.signal(signal.SIGUSR2)
        return all(
            seen.stack is not None or now - (seen.asked_at or now) > 1.5 * _STACK_S for seen in late
        )

    def _stuck(self, seen: _Seen) -> Fault:
        now = time.monotonic()
        quiet_s = now - seen.moved_at
        if not seen.joined:
            kind, what = FaultKind.NEVER_JOINED, f"has not joined after {quiet_s:.0f} s"
        elif self._limits.job_s is not None and quiet_s < min(self._limits.job_s / 2, 5.0):
            kind, what = FaultKind.TIMED_OUT, f"did not end in {self._limits.job_s:g} s"
        else:
            kind, what = FaultKind.STUCK, f"has not moved for {quiet_s:.0f} s"
        if seen.stack is not None and _waits(seen):
            what += f", and neither has any other rank: it waits in {_waits(seen)}"
        detail = seen.stack.text if seen.stack is not None else self._dump(seen)
        return _fault(seen, kind, now, what + seen.place, detail)

    def _dump(self, seen: _Seen) -> str:
        if not seen.dumped:
            seen.dumped = True
            seen.process.signal(signal.SIGUSR2)
            time.sleep(_GRACE_S / 2)
        return "the end of its log:\n" + seen.process.log_tail(most_lines=_TAIL_LINES)

    def _end(self, fault: Fault) -> RankFailure:
        label = self._seen[fault.rank].label
        failure = RankFailure(fault, label)
        for seen in self._seen:
            if seen.process.rank == fault.rank and fault.kind in _CANNOT_END:
                seen.process.signal(signal.SIGKILL)
            elif seen.process.rank == fault.rank:
                seen.process.send(End(f"{failure.who} failed first"))
            else:
                name = rank_name(seen.process.rank, seen.label)
                seen.process.send(End(f"{name} stops for {failure.who}: {fault.summary}"))
        for process in self._crew.ranks[len(self._seen) :]:
            process.signal(signal.SIGKILL)
        self._crew.discard(after_s=_GRACE_S)
        return failure


def _waits(seen: _Seen) -> str:
    return seen.stack.waiting if seen.stack is not None else seen.beat.waiting


def _turn(seen: _Seen) -> float:
    """Return the turn of what a rank waits to do: the first one waits for what was never sent."""
    turn = seen.stack.turn if seen.stack is not None else None
    return float("inf") if turn is None else turn


def _fault(seen: _Seen, kind: FaultKind, at: float, summary: str, detail: str = "") -> Fault:
    return Fault(rank=seen.process.rank, kind=kind, at=at, summary=summary, detail=detail)


def _exit_fault(seen: _Seen, code: int, at: float) -> Fault:
    if code >= 0:
        tail = seen.process.log_tail(most_lines=_TAIL_LINES)
        return _fault(seen, FaultKind.EXITED, at, f"exited with code {code}{seen.place}", tail)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        why = "killed by SIGKILL (kill -9, or the kernel for lack of memory)"
        return _fault(seen, FaultKind.KILLED, at, why + seen.place)
    kind = FaultKind.ABORTED if name == "SIGABRT" else FaultKind.KILLED
    tail = seen.process.log_tail(most_lines=_TAIL_LINES)
    why = f" ({_MAPPED_FILE})" if name == "SIGBUS" else ""
    return _fault(seen, kind, at, f"killed by {name}{why}{seen.place}", tail)
