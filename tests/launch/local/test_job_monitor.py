"""Who is late, stopped, stuck or gone: ranks whose messages and ends are made up, no process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import pytest

from echelon.launch.local import job_monitor
from echelon.launch.local.job_monitor import JobMonitor, run_job
from echelon.launch.local.messages import (
    ExitRequest,
    Heartbeat,
    JobResult,
    Limits,
    Notice,
    RankJob,
    TargetReference,
    ThreadStacks,
)
from echelon.launch.local.rank_processes import RankProcesses
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault

LABELS = ("dp0", "dp1")


@dataclass(slots=True)
class MadeUpRank:
    """A process that answers what it was told to, and notes what it is sent."""

    rank: int
    pid: int = 0
    exit_code: int | None = None
    send_failed: bool = False
    is_stopped: bool = False
    stacks: ThreadStacks | None = None
    said: list[object] = field(default_factory=list[object])
    sent: list[object] = field(default_factory=list[object])
    signals: list[signal.Signals] = field(default_factory=list[signal.Signals])

    def stopped(self) -> bool:
        """Return whether it is stopped."""
        return self.is_stopped

    def send(self, message: object) -> None:
        """Note a message; where asked, tell the stacks."""
        self.sent.append(message)
        if message is Notice.TELL_STACKS and self.stacks is not None:
            self.said.append(self.stacks)

    def signal(self, number: signal.Signals) -> None:
        """Note a signal."""
        self.signals.append(number)

    def log_tail(self, *, most_lines: int) -> str:
        """Return the end of the log."""
        return f"last {most_lines} lines"


@dataclass(slots=True)
class MadeUpRanks:
    """Two processes; `discarded` says whether they were ended."""

    ranks: list[MadeUpRank] = field(default_factory=lambda: [MadeUpRank(0), MadeUpRank(1)])
    discarded: bool = False

    def listen(self, timeout_s: float, most: int) -> Iterator[tuple[MadeUpRank, object]]:
        """Yield what was said since."""
        del timeout_s
        for rank in self.ranks[:most]:
            while rank.said:
                yield rank, rank.said.pop(0)

    def discard(self, after_s: float) -> None:
        """Note that all were ended."""
        del after_s
        self.discarded = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at ranks at every poll, and wait for nothing."""
    monkeypatch.setattr(job_monitor, "_CHECK_S", 0.0)
    monkeypatch.setattr(job_monitor, "_GRACE_S", 0.0)
    monkeypatch.setattr(job_monitor, "_STACK_S", 0.02)


@pytest.fixture
def ranks() -> MadeUpRanks:
    """Return two ranks that say nothing."""
    return MadeUpRanks()


def monitor(ranks: MadeUpRanks, **limits: float) -> JobMonitor:
    """Return the monitor of a job on both."""
    return JobMonitor(cast(RankProcesses, ranks), LABELS, Limits(**limits))


def failure_of(ranks: MadeUpRanks, **limits: float) -> RankFailure:
    """Return how a job on both ranks fails; all are ended then."""
    with pytest.raises(RankFailure) as caught:
        monitor(ranks, **limits).results()
    assert ranks.discarded
    return caught.value


def raised(rank: int, kind: FaultKind = FaultKind.RAISED, summary: str = "ValueError") -> RankFault:
    """Return the error of a rank, long ago."""
    return RankFault(rank=rank, kind=kind, at=0.0, summary=summary)


def test_results_come_in_the_order_of_ranks(ranks: MadeUpRanks) -> None:
    ranks.ranks[1].said = [Notice.GROUP_JOINED, JobResult("b")]
    polls: list[bool] = []

    def each_poll(answering: bool) -> None:
        polls.append(answering)
        if len(polls) == 1:
            ranks.ranks[0].said = [Notice.ANSWERS_STOP]
        if len(polls) == 2:
            ranks.ranks[0].said = [JobResult("a")]

    assert monitor(ranks).results(each_poll) == ["a", "b"]
    assert polls == [False, True, True]
    assert not ranks.discarded


def test_a_job_is_sent_to_its_ranks_and_they_are_let_go(ranks: MadeUpRanks) -> None:
    job = RankJob(
        number=1,
        target=TargetReference(module="m", name="f"),
        argument=None,
        labels=("dp0",),
        backend="gloo",
        port=1,
        limits=Limits(),
        introduce=False,
    )
    ranks.ranks[0].said = [JobResult(7)]
    assert run_job(cast(RankProcesses, ranks), job) == [7]
    assert ranks.ranks[0].sent == [job, Notice.LEAVE_GROUP]
    assert ranks.ranks[1].sent == []


def test_the_others_hear_for_whom_they_stop(ranks: MadeUpRanks) -> None:
    ranks.ranks[1].said = [raised(1)]
    assert failure_of(ranks).who == "rank 1 (dp1)"
    assert ranks.ranks[0].sent == [ExitRequest("rank 0 (dp0) stops for rank 1 (dp1): ValueError")]
    assert ranks.ranks[1].sent == [ExitRequest("rank 1 (dp1) failed first")]


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (3, FaultKind.EXITED, "exited with code 3"),
        (-9, FaultKind.KILLED, "killed by SIGKILL (kill -9, or the kernel for lack of memory)"),
        (-11, FaultKind.KILLED, "killed by SIGSEGV"),
        (-6, FaultKind.ABORTED, "killed by SIGABRT"),
        (-7, FaultKind.KILLED, "killed by SIGBUS (a file that it reads as memory"),
    ],
)
def test_how_a_process_ended(ranks: MadeUpRanks, code: int, kind: FaultKind, said: str) -> None:
    ranks.ranks[0].exit_code = code
    ranks.ranks[0].said = [Heartbeat(count=4, doing="step 2", waiting="")]
    ranks.ranks[1].said = [JobResult(None)]
    fault = failure_of(ranks).fault
    assert (fault.rank, fault.kind) == (0, kind)
    assert fault.summary.startswith(said)
    assert fault.summary.endswith(", last heard of at step 2")
    assert fault.detail == ("" if code == -9 else "last 25 lines")


def test_an_abort_for_bytes_of_another_collective_is_told_with_the_others(
    ranks: MadeUpRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "op.preamble.length <= op.nbytes. 16 vs 4."
    monkeypatch.setattr(MadeUpRank, "log_tail", lambda *_, **__: log)
    ranks.ranks[0].said = [raised(0, FaultKind.CONNECTION, "connection closed by peer")]
    ranks.ranks[1].exit_code = -6
    fault = failure_of(ranks).fault
    assert (fault.rank, fault.kind) == (1, FaultKind.NEVER_MET)
    assert fault.detail == "  rank 0 (dp0) was in connection closed by peer"


def test_a_lost_connection_is_the_echo_of_a_death(ranks: MadeUpRanks) -> None:
    ranks.ranks[0].said = [raised(0, FaultKind.CONNECTION, "connection closed by peer")]
    ranks.ranks[1].exit_code = -9
    assert failure_of(ranks).fault.kind is FaultKind.KILLED


def test_a_stopped_rank_cannot_end_itself(ranks: MadeUpRanks) -> None:
    ranks.ranks[1].is_stopped = True
    fault = failure_of(ranks, stopped_s=0.0).fault
    assert (fault.rank, fault.kind, fault.summary) == (1, FaultKind.STOPPED, "is stopped (SIGSTOP)")
    assert ranks.ranks[1].signals == [signal.SIGKILL]


def test_a_rank_that_says_nothing_is_made_to_write_its_stack(ranks: MadeUpRanks) -> None:
    fault = failure_of(ranks, silent_s=0.0).fault
    assert (fault.rank, fault.kind) == (0, FaultKind.SILENT)
    assert ranks.ranks[0].signals == [signal.SIGUSR2, signal.SIGKILL]
    assert fault.detail == "the end of its log:\nlast 25 lines"


def test_a_busy_rank_is_stuck_and_one_that_waits_is_not(ranks: MadeUpRanks) -> None:
    waits = ThreadStacks(text="in recv", waiting="recv", turn=1)
    busy = ThreadStacks(text="in read()", waiting="")
    for rank, stacks in zip(ranks.ranks, (waits, busy), strict=True):
        rank.said, rank.stacks = [Notice.GROUP_JOINED], stacks
    fault = failure_of(ranks, step_s=0.01).fault
    assert (fault.rank, fault.kind, fault.detail) == (1, FaultKind.STUCK, "in read()")
    assert fault.summary == "has not moved for 0 s"


def test_ranks_that_never_meet_are_ended(
    ranks: MadeUpRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_monitor, "_ASK_S", 0.0)
    ranks.ranks[0].stacks = ThreadStacks(text="", waiting="", call="barrier", place="a.py:3")
    ranks.ranks[0].said = [Notice.GROUP_JOINED]
    ranks.ranks[1].said = [Notice.GROUP_JOINED, JobResult(1)]
    fault = failure_of(ranks, still_s=0.01).fault
    assert (fault.rank, fault.kind) == (1, FaultKind.NEVER_MET)
    assert fault.summary.startswith("does not enter barrier, in which rank 0 (dp0) waits")


def test_where_all_wait_the_first_in_the_order_of_work_is_named(ranks: MadeUpRanks) -> None:
    for rank, turn in zip(ranks.ranks, (8, 5), strict=True):
        rank.said = [Notice.GROUP_JOINED]
        rank.stacks = ThreadStacks(text="", waiting="recv", turn=turn)
    fault = failure_of(ranks, step_s=0.01).fault
    assert fault.rank == 1
    assert fault.summary.endswith(", and neither has any other rank: it waits in recv")


@pytest.mark.parametrize(
    ("limits", "kind", "said"),
    [
        ({"join_s": 0.01}, FaultKind.NEVER_JOINED, "has not joined after 0 s"),
        ({"job_s": 0.05}, FaultKind.TIMED_OUT, "did not end in 0.05 s"),
    ],
)
def test_a_job_that_does_not_begin_or_end(
    ranks: MadeUpRanks, limits: dict[str, Any], kind: FaultKind, said: str
) -> None:
    counts = count()

    def move(_: bool) -> None:
        for rank in ranks.ranks:
            rank.said.append(Heartbeat(count=next(counts), doing="", waiting=""))

    for rank in ranks.ranks:
        rank.stacks = ThreadStacks(text="busy", waiting="")
        rank.said = [] if "join_s" in limits else [Notice.GROUP_JOINED]
    with pytest.raises(RankFailure) as caught:
        monitor(ranks, **limits).results(move if "job_s" in limits else lambda _: None)
    assert (caught.value.fault.kind, caught.value.fault.summary) == (kind, said)


def test_a_rank_that_cannot_be_reached_has_gone(
    ranks: MadeUpRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_monitor, "_UNREACHABLE_S", 0.01)
    ranks.ranks[0].send_failed = True
    ranks.ranks[1].said = [JobResult(None)]
    monkeypatch.setattr(job_monitor, "settle_s", lambda fault: 0.0)
    assert failure_of(ranks).fault.summary == "closed its channel"
