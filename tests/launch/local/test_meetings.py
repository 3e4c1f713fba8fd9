"""Ranks that never meet: told by what stands still, whatever time a slow program takes."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_RAISED
from echelon.launch.desync.fingerprint import Activity
from echelon.launch.local import desync_watch as meetings
from echelon.launch.local.desync_watch import (
    KnownRank,
    MeetingWatch,
    odd_rank,
    where_lost,
    wrong_size,
)
from echelon.launch.local.messages import ThreadStacks
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault

REDUCES = ThreadStacks(text="", waiting="", call="all_reduce of float32 [8]", place="a.py:3 (f())")
GATHERS = ThreadStacks(text="", waiting="", call="all_gather", place="a.py:5 (g())")
SLEEPS = ThreadStacks(text="", waiting="", place="a.py:9 (sleep(60))", asleep=True)
LOCKED = ThreadStacks(text="", waiting="", place="a.py:11 (lock.acquire())")


class Clock:
    """Time and processor seconds that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Begin at 0."""
        self.now = 0.0
        self.used = {0: 0.0, 1: 0.0, 2: 0.0}
        monkeypatch.setattr("echelon.launch.local.desync_watch.time.monotonic", lambda: self.now)
        monkeypatch.setattr(meetings, "processor_seconds", self.used.__getitem__)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock that stands still."""
    return Clock(monkeypatch)


def view(rank: int, stacks: ThreadStacks | None) -> KnownRank:
    """Return a rank that has returned, or is where `stacks` says."""
    return KnownRank(
        rank=rank,
        label=f"dp{rank}",
        pid=rank,
        activity=Activity.RETURNED if stacks is None else None,
        doing="step 2",
        count=5,
        stacks=stacks,
    )


def end_of(clock: Clock, *stacks: ThreadStacks | None, busy: int | None = None) -> RankFault | None:
    """Return what a minute of ranks that do the same all the time ends with."""
    watch = MeetingWatch(15.0)
    ranks = [view(rank, one) for rank, one in enumerate(stacks)]
    for second in range(60):
        clock.now = float(second)
        if busy is not None:
            clock.used[busy] += 0.5
        if (fault := watch.look(ranks)) is not None:
            return fault
    return None


def test_a_rank_that_has_ended_is_named_with_the_lines_of_all(clock: Clock) -> None:
    fault = end_of(clock, REDUCES, None)
    assert fault is not None
    assert (fault.rank, fault.kind, clock.now) == (1, FaultKind.NEVER_MET, 15.0)
    assert str(RankFailure(fault, "dp1")).splitlines() == [
        "error[collectives-meet]: rank 1 (dp1): does not enter all_reduce of float32 [8], in which "
        "rank 0 (dp0) waits; nothing has moved for 15 s",
        "  rank 0 (dp0) waits in all_reduce of float32 [8] in step 2, at a.py:3 (f())",
        "  rank 1 (dp1) has ended its program",
        "  more: echelon explain collectives-meet",
    ]


def test_two_collectives_are_named_both(clock: Clock) -> None:
    fault = end_of(clock, REDUCES, GATHERS, REDUCES)
    assert fault is not None
    assert fault.rank == 1
    assert fault.summary.startswith(
        "waits in all_gather, and rank 0 (dp0) in all_reduce of float32"
    )


@pytest.mark.parametrize(("stacks", "seconds"), [(SLEEPS, 15.0), (LOCKED, None)])
def test_what_is_no_wait_for_ranks_has_longer(
    clock: Clock, stacks: ThreadStacks, seconds: float | None
) -> None:
    fault = end_of(clock, REDUCES, stacks)
    assert (fault and fault.rank, fault and fault.at) == (seconds and 1, seconds)


def test_a_slow_program_is_left_alone(clock: Clock) -> None:
    assert end_of(clock, REDUCES, LOCKED, busy=1) is None
    assert end_of(clock, REDUCES, GATHERS, busy=0) is None
    assert end_of(clock, SLEEPS, SLEEPS) is None


def test_one_at_work_is_named_before_one_that_has_ended() -> None:
    assert odd_rank([view(0, None), view(1, REDUCES), view(2, SLEEPS)]).rank == 2


def test_bytes_of_another_collective_are_told_by_the_log() -> None:
    log = (
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 4. Rec\n"
        f'  File "{meetings.__file__}", line 3 in look\n  File "/data/train.py", line 8 in step\n'
    )
    told = wrong_size(log)
    assert told is not None
    assert told.startswith("a collective at train.py:8 got 16 bytes where it takes 4: another rank")
    assert wrong_size("Aborted") is None


def test_where_the_others_were_is_told_by_their_errors() -> None:
    text = "step 0, rank 0: a.py:16 (f(x)): RuntimeError: Read error: Connection reset by peer"
    error = ConfigError(VERIFY_RAISED.problem(text))
    fault = RankFault(rank=0, kind=FaultKind.CONNECTION, at=0.0, summary="", error=error)
    assert where_lost(fault) == "step 0, rank 0: a.py:16 (f(x))"
