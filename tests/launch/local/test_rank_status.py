"""What a supervisor knows of a rank, for those who compare ranks, and what its exit says."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import cast

import pytest

from echelon.launch.desync.fingerprint import Activity
from echelon.launch.local.messages import Heartbeat, ThreadStacks
from echelon.launch.local.rank_processes import RankProcess
from echelon.launch.local.rank_status import (
    RankStatus,
    exit_fault,
    known_of,
    new_fault,
    turn_of,
    wait_of,
)
from echelon.launch.root_cause import FaultKind


@dataclass(slots=True)
class MadeUpProcess:
    """A process without one."""

    rank: int = 3
    pid: int = 7
    exit_code: int | None = None
    log: str = "the end of the log"

    def log_tail(self, *, most_lines: int) -> str:
        """Return the end of its log."""
        del most_lines
        return self.log


def status(process: MadeUpProcess | None = None) -> RankStatus:
    """Return what is known of a rank in step 2."""
    return RankStatus(
        process=cast(RankProcess, process or MadeUpProcess()),
        label="dp3",
        moved_at=0.0,
        heard_at=0.0,
        heartbeat=Heartbeat(count=5, doing="step 2", waiting="all_reduce"),
    )


@pytest.mark.parametrize(
    ("kind", "activity"),
    [
        (FaultKind.RAISED, Activity.RAISED),
        (FaultKind.KILLED, Activity.GONE),
        (FaultKind.ABORTED, Activity.GONE),
        (FaultKind.STOPPED, Activity.UNKNOWN),
        (FaultKind.CONNECTION, None),
    ],
)
def test_a_fault_says_what_a_rank_does(kind: FaultKind, activity: Activity | None) -> None:
    seen = status()
    assert known_of(seen).activity is None
    seen.fault = new_fault(seen, kind, 1.0, "why")
    assert known_of(seen).activity == activity


def test_a_rank_that_has_returned_or_ended_is_known_to_have() -> None:
    seen = status()
    seen.returned = True
    assert known_of(seen).activity is Activity.RETURNED
    gone = status(MadeUpProcess(exit_code=-6))
    gone.fault = new_fault(gone, FaultKind.NEVER_MET, 1.0, "why")
    assert known_of(gone).activity is Activity.GONE
    assert known_of(gone).doing == "step 2"


def test_stacks_say_more_than_heartbeats() -> None:
    seen = status()
    assert (wait_of(seen), turn_of(seen)) == ("all_reduce", float("inf"))
    seen.stack = ThreadStacks(text="", waiting="recv", turn=4)
    assert (wait_of(seen), turn_of(seen)) == ("recv", 4)
    assert known_of(seen).name == "rank 3 (dp3)"


@pytest.mark.parametrize(
    ("code", "kind", "summary"),
    [
        (7, FaultKind.EXITED, "exited with code 7, last heard of at step 2"),
        (-signal.SIGKILL, FaultKind.KILLED, "killed by SIGKILL (kill -9"),
        (-signal.SIGSEGV, FaultKind.KILLED, "killed by SIGSEGV, last heard"),
        (-signal.SIGBUS, FaultKind.KILLED, "killed by SIGBUS (a file that it reads as memory"),
        (-signal.SIGABRT, FaultKind.ABORTED, "killed by SIGABRT"),
        (-200, FaultKind.KILLED, "killed by signal 200"),
    ],
)
def test_an_exit_says_why(code: int, kind: FaultKind, summary: str) -> None:
    fault = exit_fault(status(), code, 1.0)
    assert (fault.rank, fault.kind) == (3, kind)
    assert fault.summary.startswith(summary)


def test_an_abort_over_sizes_is_no_kill() -> None:
    log = "op.preamble.length <= op.nbytes. 96 vs 32"
    fault = exit_fault(status(MadeUpProcess(log=log)), -signal.SIGABRT, 1.0)
    assert fault.kind is FaultKind.NEVER_MET
    assert "got 96 bytes where it takes 32" in fault.summary
