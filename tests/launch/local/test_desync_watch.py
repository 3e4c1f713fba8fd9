"""What a supervisor makes of rings: when it asks, what it ends, what it only tells."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from echelon.launch.desync import verdict
from echelon.launch.desync.fingerprint import Activity
from echelon.launch.desync.ring import DEVICE_READ, FingerprintRing, RingReader, ring_path
from echelon.launch.local import desync_watch as watch
from echelon.launch.local.desync_watch import DesyncWatch, KnownRank, evidence_of
from echelon.launch.local.messages import ThreadStacks
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault

RANKS = (0, 1, 2)


@pytest.fixture
def rings(tmp_path: Path) -> list[FingerprintRing]:
    """Return a ring for each of three ranks."""
    return [FingerprintRing(ring_path(tmp_path, 4, rank)) for rank in RANKS]


@pytest.fixture
def watched(tmp_path: Path) -> DesyncWatch:
    """Return the watch of these ranks, for which few waits are short."""
    return DesyncWatch(tmp_path, 4, len(RANKS), 0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every wait for one that lasts."""
    monkeypatch.setattr(verdict.find_stall, "__defaults__", (0.0,))
    monkeypatch.setattr(watch, "_ANSWER_S", 0.0)


def call(ring: FingerprintRing, kind: str = "all_reduce", *, dtype: str = "float32") -> int:
    """Begin a collective of all three ranks, and wait in it."""
    group, tensor = ring.group("dp", "dp", RANKS), ring.tensor((4,), dtype)
    site = ring.text("data.py:3 in start")
    number = ring.issue((group, 1, ring.text(kind), ring.text("grads"), tensor, site, 0, -1, -1))
    ring.wait(number)
    return number


def known(
    activities: dict[int, Activity] | None = None, stacks: ThreadStacks | None = None
) -> list[KnownRank]:
    """Return what is known of the ranks beside their rings."""
    return [
        KnownRank(
            rank=rank,
            label=f"dp{rank}",
            activity=(activities or {}).get(rank),
            doing="step 2",
            waiting="",
            stacks=stacks,
        )
        for rank in RANKS
    ]


def test_files_have_no_name_once_they_are_open(
    rings: list[FingerprintRing], watched: DesyncWatch, tmp_path: Path
) -> None:
    assert len(list(tmp_path.iterdir())) == 3
    assert not watched.wants_stacks(time.monotonic())
    assert list(tmp_path.iterdir()) == []
    call(rings[0])
    time.sleep(0.01)
    assert watched.wants_stacks(time.monotonic())
    assert not watched.wants_stacks(time.monotonic()), "it has asked a moment ago"
    watched.close()


def test_calls_that_differ_are_found_without_a_wait(
    rings: list[FingerprintRing], watched: DesyncWatch
) -> None:
    for ring, dtype in zip(rings, ("float32", "int32", "float32"), strict=True):
        ring.go_on(call(ring, dtype=dtype))
    time.sleep(0.01)
    found = watched.look(known())
    assert found is not None
    fault, certain = found
    assert (fault.rank, fault.kind, certain) == (1, FaultKind.NEVER_MET, True)
    text = str(RankFailure(fault, "dp1"))
    assert text.startswith(
        "error[collectives-meet]: rank 1 (dp1): calls all_reduce grads with int32"
    )
    assert text.count("data.py:3 in start") == 2


def test_a_rank_that_computes_is_told_once(
    rings: list[FingerprintRing], watched: DesyncWatch
) -> None:
    for ring in rings[:2]:
        call(ring)
    time.sleep(0.01)
    assert watched.wants_stacks(time.monotonic())
    time.sleep(0.01)
    assert watched.look(known()) is None, "it is told when it is seen twice"
    stacks = ThreadStacks(text="main\nthread other:\nx", waiting="", place="train.py:9")
    found = watched.look(known(stacks=stacks))
    assert found is not None
    fault, certain = found
    assert (fault.rank, certain) == (2, False)
    assert "it is at train.py:9" in fault.detail
    assert "thread other" not in fault.detail
    assert watched.look(known()) is None


def test_a_rank_that_has_returned_ends_the_run(
    rings: list[FingerprintRing], watched: DesyncWatch
) -> None:
    for ring in rings[:2]:
        call(ring)
    time.sleep(0.01)
    watched.wants_stacks(time.monotonic())
    time.sleep(0.01)
    returned = known({2: Activity.RETURNED})
    found = [watched.look(returned) for _ in range(2)][1]
    assert found is not None
    assert found[0].summary.startswith("has ended its program, and ranks 0, 1 wait for it in")
    assert found[1]


def fault(kind: FaultKind, rank: int, detail: str = "") -> RankFault:
    """Return a fault of a rank."""
    return RankFault(rank=rank, kind=kind, at=1.0, summary="something happened", detail=detail)


def test_an_abort_inside_of_the_backend_has_its_cause(
    rings: list[FingerprintRing], watched: DesyncWatch
) -> None:
    for ring, kind in zip(rings, ("all_reduce", "all_reduce", "all_gather"), strict=True):
        call(ring, kind)
    found = watched.explained(fault(FaultKind.ABORTED, 0), known({0: Activity.GONE}))
    assert (found.rank, found.kind, found.at) == (2, FaultKind.NEVER_MET, 1.0)


def test_a_lost_connection_after_equal_calls_is_a_link(
    rings: list[FingerprintRing], watched: DesyncWatch
) -> None:
    for ring in rings:
        call(ring)
    time.sleep(0.01)
    found = watched.explained(fault(FaultKind.CONNECTION, 0), known())
    assert found.kind is FaultKind.LINK
    assert str(RankFailure(found, "dp0")).startswith("error[link-carries]: rank 0 (dp0): and ranks")
    assert found.detail.endswith("something happened")


def test_an_error_is_told_with_what_the_others_wait_in(
    rings: list[FingerprintRing], watched: DesyncWatch
) -> None:
    for ring in rings[:2]:
        call(ring)
    raised = fault(FaultKind.RAISED, 2, "Traceback\n  here")
    found = watched.explained(raised, known({2: Activity.RAISED}))
    assert (found.rank, found.kind) == (2, FaultKind.RAISED)
    assert found.detail.startswith("Traceback\n  here\n  rank 2 (dp2) has called no operation\n")
    assert "ranks 0, 1 all_reduce grads of float32 [4]" in found.detail
    met = fault(FaultKind.NEVER_MET, 1, "told already")
    assert watched.explained(met, known()) is met


def test_a_timeout_blames_whom_the_others_wait_for(
    rings: list[FingerprintRing], watched: DesyncWatch
) -> None:
    for ring in rings[:2]:
        call(ring)
    found = watched.explained(fault(FaultKind.STUCK, 0), known())
    assert (found.rank, found.kind) == (2, FaultKind.STUCK)
    assert found.summary.startswith("has not come to all_reduce grads")


def test_a_host_that_reads_its_device_waits_where_the_device_stands(
    rings: list[FingerprintRing],
) -> None:
    number = call(rings[0])
    rings[0].read_device()
    reader = RingReader(rings[0].path)
    assert reader.wait()[0] == DEVICE_READ
    stacks = ThreadStacks(text="", waiting="all_reduce", unfinished=number)
    found = evidence_of(known(stacks=stacks)[0], reader, time.monotonic())
    assert (found.activity, found.waits_for, found.counts_until) == (Activity.WAITS, number, number)
    # A device that has come past all of them is no wait for other ranks.
    past = ThreadStacks(text="", waiting="", unfinished=None)
    found = evidence_of(known(stacks=past)[0], reader, time.monotonic())
    assert (found.activity, found.waits_for) == (Activity.RUNS, None)
