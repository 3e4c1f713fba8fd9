# SPDX-License-Identifier: Apache-2.0
"""What a supervisor knows of one rank, and what its exit says."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from echelon.launch.desync.fingerprint import Activity
from echelon.launch.local.desync_watch import KnownRank, wrong_size
from echelon.launch.local.messages import Heartbeat, ThreadStacks
from echelon.launch.local.rank_processes import RankProcess
from echelon.launch.root_cause import FaultKind, RankFault, SignsOfLife, exit_text

TAIL_LINES = 25  # lines of a log
_ABORT_LINES = 200  # lines of a log: what native code said before the stacks of all threads

_ENDED_BY = {
    FaultKind.KILLED: Activity.GONE,
    FaultKind.ABORTED: Activity.GONE,
    FaultKind.EXITED: Activity.GONE,
    FaultKind.RAISED: Activity.RAISED,
    FaultKind.STOPPED: Activity.UNKNOWN,
    FaultKind.SILENT: Activity.UNKNOWN,
}
"""What a rank with a fault does; those that are not here wait on in an operation, or run."""


@dataclass(slots=True, kw_only=True)
class RankStatus(SignsOfLife):
    """Hold what is known of one rank.

    Times are seconds of the monotonic clock; None: it did not happen.
    """

    process: RankProcess
    """Its process."""
    label: str
    """Its rank and place in the mesh, as users read it."""
    moved_at: float
    """When its heartbeat last said something new."""
    joined: bool = False
    """Whether it is in the process group."""
    answers_stop: bool = False
    """Whether it answers a request to stop with a result."""
    returned: bool = False
    """Whether its target has returned."""
    value: object = None
    """What the target returned."""
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(count=-1, doing="", waiting=""))
    """Its last heartbeat."""
    deaf_since: float | None = None
    """Since when it does not answer."""
    asked_at: float | None = None
    """When it was asked for its stack."""
    dumped: bool = False
    """Whether it was made to write its stack into its log, for want of an answer."""
    stack: ThreadStacks | None = None
    """What its threads were doing."""
    fault: RankFault | None = None
    """What went wrong on it."""
    attempt: int = 0
    """How often it was started again."""
    dropped: bool = False
    """Whether the job goes on without it."""

    @property
    def open(self) -> bool:
        """Return whether the rank still works, as far as is known."""
        return not self.returned and not self.dropped and self.fault is None

    @property
    def place(self) -> str:
        """Return what the rank was last doing, as an ending of a sentence."""
        return f", last heard of at {self.heartbeat.doing}" if self.heartbeat.doing else ""


def known_of(seen: RankStatus) -> KnownRank:
    """Return what is known of a rank at this time, beside its ring."""
    activity: Activity | None = None
    if seen.process.exit_code is not None:
        activity = Activity.GONE
    elif seen.fault is not None:
        activity = _ENDED_BY.get(seen.fault.kind)
    elif seen.returned or seen.dropped:
        activity = Activity.RETURNED
    return KnownRank(
        rank=seen.process.rank,
        label=seen.label,
        pid=seen.process.pid,
        activity=activity,
        count=seen.heartbeat.count,
        doing=seen.heartbeat.doing,
        waiting=seen.heartbeat.waiting,
        stacks=seen.stack,
    )


def wait_of(seen: RankStatus) -> str:
    """Return what a rank waits for, by its stacks or else by its heartbeat."""
    return seen.stack.waiting if seen.stack is not None else seen.heartbeat.waiting


def turn_of(seen: RankStatus) -> float:
    """Return the turn of what a rank waits to do: the first one waits for what was never sent."""
    turn = seen.stack.turn if seen.stack is not None else None
    return float("inf") if turn is None else turn


def new_fault(
    seen: RankStatus, kind: FaultKind, at: float, summary: str, detail: str = ""
) -> RankFault:
    """Return a fault of a rank."""
    return RankFault(rank=seen.process.rank, kind=kind, at=at, summary=summary, detail=detail)


def exit_fault(seen: RankStatus, code: int, at: float) -> RankFault:
    """Return the fault of a process that has ended with a code, negative for a signal."""
    tail, text = seen.process.log_tail(most_lines=TAIL_LINES), exit_text(code) + seen.place
    if code >= 0:
        return new_fault(seen, FaultKind.EXITED, at, text, tail)
    if code == -signal.SIGKILL:
        return new_fault(seen, FaultKind.KILLED, at, text)
    if code != -signal.SIGABRT:
        return new_fault(seen, FaultKind.KILLED, at, text, tail)
    mixed = wrong_size(seen.process.log_tail(most_lines=_ABORT_LINES))
    if mixed is not None:
        return new_fault(seen, FaultKind.NEVER_MET, at, mixed + seen.place)
    return new_fault(seen, FaultKind.ABORTED, at, text, tail)
