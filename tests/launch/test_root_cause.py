"""Who failed first: causes beat echoes, then the earliest wins."""

from __future__ import annotations

import pickle

import pytest

from echelon.launch.root_cause import (
    FaultKind,
    RankFailure,
    RankFault,
    SignsOfLife,
    find_root_cause,
    settle_s,
)

CAUSES_FIRST = (
    FaultKind.KILLED,
    FaultKind.RAISED,
    FaultKind.EXITED,
    FaultKind.ABORTED,
    FaultKind.STUCK,
    FaultKind.CONNECTION,
)


def fault(rank: int, kind: FaultKind, at: float) -> RankFault:
    return RankFault(rank=rank, kind=kind, at=at, summary="went away")


@pytest.mark.parametrize("cause", range(len(CAUSES_FIRST) - 1))
def test_a_cause_beats_an_earlier_echo(cause: int) -> None:
    later = fault(3, CAUSES_FIRST[cause], at=9.0)
    for echo in CAUSES_FIRST[cause + 1 :]:
        assert find_root_cause([fault(0, echo, at=1.0), later]) is later


@pytest.mark.parametrize("kind", FaultKind)
def test_of_one_kind_the_earliest_is_first(kind: FaultKind) -> None:
    early, late = fault(2, kind, at=1.0), fault(0, kind, at=1.5)
    assert find_root_cause([late, early]) is early


def test_only_what_may_be_an_echo_is_waited_for() -> None:
    waits = [settle_s(fault(0, kind, at=0.0)) for kind in FaultKind]
    assert settle_s(fault(0, FaultKind.KILLED, at=0.0)) == 0
    assert settle_s(fault(0, FaultKind.CONNECTION, at=0.0)) == max(waits) < 10


def test_a_failure_names_rank_and_place_and_crosses_processes() -> None:
    failure = RankFailure(fault(3, FaultKind.KILLED, at=0.0), "pp1 tp1")
    again = pickle.loads(pickle.dumps(failure))
    assert again.fault == failure.fault
    assert str(again) == str(failure)
    assert str(failure).startswith("error[rank-killed]: rank 3 (pp1 tp1): went away")
    assert failure.exit_code == 4


def test_a_rank_is_stopped_or_silent_once_it_was_so_for_long() -> None:
    signs = SignsOfLife(heard_at=10.0)

    def missed(now: float, *, stopped: bool = False) -> FaultKind | None:
        wrong = signs.missed(now, stopped=stopped, stopped_s=3.0, silent_s=5.0)
        return None if wrong is None else wrong[0]

    assert missed(15.0) is None
    assert missed(15.5) is FaultKind.SILENT
    assert missed(16.0, stopped=True) is None
    assert missed(19.0, stopped=True) is FaultKind.STOPPED
    signs.heard_at = 20.0
    assert missed(21.0) is None
    assert missed(22.0, stopped=True) is None
