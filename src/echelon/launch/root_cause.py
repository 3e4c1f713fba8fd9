# SPDX-License-Identifier: Apache-2.0
"""Decide whether a rank is stopped or silent, and which one failed first. No processes here.

When one rank dies, its neighbours raise "connection closed by peer" milliseconds later, often
before anyone has heard of the death. So faults are weighed by what can be the echo of another:
a SIGKILL echoes nothing, a connection error is nearly always an echo.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from echelon.core.errors import EchelonError, RunFailed
from echelon.core.rulebook import launch as rules
from echelon.core.rules import Rule


class FaultKind(StrEnum):
    """Name how a rank failed."""

    KILLED = "killed"
    STOPPED = "stopped"
    RAISED = "raised"
    NEVER_JOINED = "never joined"
    NEVER_MET = "never met"
    EXITED = "exited"
    ABORTED = "aborted"
    SILENT = "silent"
    STUCK = "stuck"
    LINK = "link"
    CONNECTION = "connection"
    TIMED_OUT = "timed out"


CANNOT_END = (FaultKind.STOPPED, FaultKind.SILENT)
"""Faults of a process that cannot end itself."""

_FACTS: Mapping[FaultKind, tuple[int, float, Rule]] = {
    FaultKind.KILLED: (0, 0.0, rules.RANK_KILLED),
    FaultKind.STOPPED: (0, 0.0, rules.RANK_STOPPED),
    FaultKind.NEVER_MET: (1, 0.5, rules.COLLECTIVES_MEET),
    FaultKind.RAISED: (1, 0.3, rules.RANK_RAISED),
    FaultKind.EXITED: (2, 1.0, rules.RANK_KILLED),
    FaultKind.NEVER_JOINED: (2, 1.0, rules.RANK_NEVER_JOINED),
    FaultKind.ABORTED: (3, 1.0, rules.RANK_KILLED),
    FaultKind.STUCK: (4, 0.0, rules.RANK_STUCK),
    FaultKind.SILENT: (4, 0.0, rules.RANK_STOPPED),
    FaultKind.LINK: (5, 5.0, rules.LINK_CARRIES),
    FaultKind.CONNECTION: (5, 5.0, rules.RANK_RAISED),
    FaultKind.TIMED_OUT: (6, 0.0, rules.JOB_TIMED_OUT),
}
"""Its place among causes, heaviest first; seconds in which a better one may come; its rule."""


_WHY_KILLED = {
    "SIGKILL": "kill -9, or the kernel for lack of memory",
    "SIGBUS": "a file that it reads as memory, of zero.offload_dir or of the data, was cut short "
    "or its disk failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """State how a rank failed; `at` is on the machine's monotonic clock."""

    rank: int
    kind: FaultKind
    at: float
    summary: str
    detail: str = ""
    error: EchelonError | None = None


@dataclass(slots=True, kw_only=True)
class SignsOfLife:
    """Judge whether a rank is stopped or silent; times are of one monotonic clock."""

    heard_at: float
    """When it was last heard of."""
    stopped_since: float | None = None
    """Since when the system says that it is stopped; None: it does not."""

    def missed(
        self, now: float, *, stopped: bool, stopped_s: float, silent_s: float
    ) -> tuple[FaultKind, str] | None:
        """The fault and its words, once it has been there for that many seconds; else None."""
        if stopped:
            self.stopped_since = self.stopped_since or now
            if now - self.stopped_since >= stopped_s:
                return FaultKind.STOPPED, "is stopped (SIGSTOP)"
            return None
        self.stopped_since = None
        if now - self.heard_at > silent_s:
            return FaultKind.SILENT, f"has said nothing for {silent_s:g} s"
        return None


def find_root_cause(faults: Iterable[RankFault]) -> RankFault:
    """Return the fault that explains the others: the heaviest kind, then the earliest."""
    return min(faults, key=lambda fault: (_FACTS[fault.kind][0], fault.at, fault.rank))


def settle_s(fault: RankFault) -> float:
    """Return how long after `fault` a better explanation may still arrive."""
    return _FACTS[fault.kind][1]


class RankFailure(RunFailed):
    """A rank failed and the run ended: which one, how, and what it said.

    `error` is the rank's own EchelonError where it raised one.
    """

    def __init__(self, fault: RankFault, label: str) -> None:
        """Tell of `fault` on the rank with this place in the mesh."""
        self.fault = fault
        self.label = label
        text = f"{self.who}: {fault.summary}"
        if fault.detail:
            text += "\n" + fault.detail.rstrip()
        super().__init__(_FACTS[fault.kind][2].problem(text))

    def __reduce__(self) -> tuple[type[RankFailure], tuple[RankFault, str]]:
        """Let the failure cross a process boundary."""
        return type(self), (self.fault, self.label)

    @property
    def rank(self) -> int:
        """Return the rank that failed first."""
        return self.fault.rank

    @property
    def who(self) -> str:
        """Return the rank and its place: ``rank 3 (pp1 tp1)``."""
        return rank_name(self.fault.rank, self.label)

    @property
    def error(self) -> EchelonError | None:
        """Return what the rank raised, where that was an error for the user."""
        return self.fault.error


def exit_text(code: int) -> str:
    """The end of a process, in words; `code` is negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    why = f" ({_WHY_KILLED[name]})" if name in _WHY_KILLED else ""
    return f"killed by {name}{why}"


def rank_name(rank: int, label: str) -> str:
    """Return how a rank is called everywhere: ``rank 3 (pp1 tp1)``."""
    return f"rank {rank} ({label})" if label else f"rank {rank}"
