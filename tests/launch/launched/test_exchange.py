"""Under torchrun: ranks tell their calls in the store, and one compares them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.launch.desync.connections import Connections, StalledConnection
from echelon.launch.desync.findings import Finding
from echelon.launch.desync.fingerprint import Activity
from echelon.launch.desync.ring import FingerprintRing
from echelon.launch.launched import exchange
from echelon.launch.launched.exchange import DesyncExchange, RankAlone
from echelon.launch.local.desync_watch import KnownRank
from echelon.launch.local.messages import Limits

LABELS = ("dp0", "dp1", "dp2")

STALLED = StalledConnection(
    local="10.0.0.2:7", peer="10.0.0.1:9", packets=3, repeats=4, silent_s=2.5
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for answers for a moment only."""
    monkeypatch.setattr(exchange, "_COLLECT_S", 0.4)
    monkeypatch.setattr(exchange, "_POLL_S", 0.01)
    monkeypatch.setattr(exchange, "_APART_S", 0.0)


@pytest.fixture
def rings(tmp_path: Path) -> list[FingerprintRing]:
    """Return a ring for each of three ranks."""
    return [FingerprintRing(tmp_path / str(rank)) for rank in range(3)]


def known(rank: int, activity: Activity | None = None) -> KnownRank:
    """Return what a rank says of itself."""
    return KnownRank(
        rank=rank, label=LABELS[rank], activity=activity, doing="step 3", waiting="", stacks=None
    )


def call(ring: FingerprintRing, kind: str) -> None:
    """Begin a collective of all three ranks, and wait in it."""
    group = ring.group("dp", "dp", (0, 1, 2))
    number = ring.issue((group, 1, ring.text(kind), ring.text("grads"), 0, 0, 0, -1, -1))
    ring.wait(number)


def test_who_waits_for_too_long_asks_and_all_answer(rings: list[FingerprintRing]) -> None:
    store = HashStore()
    parts = [
        DesyncExchange(store, ring, rank=rank, host="here", after_s=0.05)
        for rank, ring in enumerate(rings)
    ]
    assert parts[0].due_s(time.monotonic()) is None
    for ring, kind in zip(rings, ("all_reduce", "all_gather", "all_reduce"), strict=True):
        call(ring, kind)
    due = parts[0].due_s(time.monotonic())
    assert due is not None
    assert 0.0 < due <= 0.05

    def answer() -> None:
        for _ in range(20):
            for rank in (1, 2):
                parts[rank].answer(lambda rank=rank: known(rank))
            time.sleep(0.01)

    thread = threading.Thread(target=answer)
    thread.start()
    verdict, evidence = parts[0].compare(LABELS, lambda: known(0))
    thread.join()
    assert verdict is not None
    assert (verdict.finding, verdict.odd) == (Finding.OPERATION, (1,))
    assert [one.label for one in evidence] == list(LABELS)
    # It asks no more for a while.
    later = parts[0].due_s(time.monotonic())
    assert later is not None
    assert later > 2.0
    assert parts[0].own_wait().waiting == evidence[0].waiting


def test_the_ring_of_a_process_that_is_gone_is_read_on_its_host(
    rings: list[FingerprintRing],
) -> None:
    for host, certain in (("here", True), ("elsewhere", False)):
        store = HashStore()
        DesyncExchange(store, rings[1], rank=1, host=host, after_s=1.0)
        third = DesyncExchange(store, rings[2], rank=2, host="here", after_s=1.0)
        asking = DesyncExchange(store, rings[0], rank=0, host="here", after_s=1.0)
        if host == "here":
            for ring, kind in zip(rings, ("all_reduce", "all_gather", "all_reduce"), strict=True):
                call(ring, kind)
        thread = threading.Timer(0.1, lambda third=third: third.answer(lambda: known(2)))
        thread.start()
        verdict, _ = asking.compare(LABELS, lambda: known(0))
        thread.join()
        assert verdict is not None
        assert verdict.odd == (1,)
        assert verdict.certain == certain
        assert verdict.finding is (Finding.OPERATION if certain else Finding.UNKNOWN)


@pytest.fixture
def ring(tmp_path: Path) -> FingerprintRing:
    """Return the ring of a rank that waits in a sum of two ranks."""
    ring = FingerprintRing(tmp_path / "ring")
    group, tensor = ring.group("dp", "dp", (0, 1)), ring.tensor((4,), "float32")
    site = ring.text("data.py:3 in start")
    fields = (group, 1, ring.text("all_reduce"), ring.text("grads"), tensor, site, 0, -1, -1)
    ring.wait(ring.issue(fields))
    return ring


def rank_alone(ring: FingerprintRing, said: list[str], *, ticked_at: float) -> RankAlone:
    """Return rank 1, whose watchdog last looked at the store at `ticked_at`."""
    limits = Limits(desync_s=2.0, step_s=20.0)
    return RankAlone(
        ring.path,
        rank=1,
        label="dp1",
        limits=limits,
        ticked_at=lambda: ticked_at,
        end=said.append,
    )


def test_it_tells_its_wait_once_and_ends_when_that_is_too_long(
    ring: FingerprintRing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange, "own_connections", lambda: Connections(stalled=(STALLED,)))
    said: list[str] = []
    now = time.monotonic()
    one = rank_alone(ring, said, ticked_at=now)
    one.look(now + 1.0)
    assert capsys.readouterr().err == "", "it has not waited for long"
    one.look(now + 5.0)
    assert capsys.readouterr().err.splitlines() == [
        "note: rank 1 (dp1): waits in all_reduce grads, and nothing comes from 10.0.0.1, nor from "
        "the run's store",
        "  rank 1 (dp1) all_reduce grads of float32 [4], call 1 of ranks 0, 1 (dp), at data.py:3 "
        "in start",
        "  rank 1 (dp1) has sent 3 packets to 10.0.0.1:9 and again 4 times, from 10.0.0.2:7 to "
        "10.0.0.1:9, and heard nothing for 2.5 s",
        "  no error yet: the run goes on until a step has taken 20 s",
    ]
    one.look(now + 6.0)
    assert capsys.readouterr().err == ""
    assert said == []
    one.look(now + 21.0)
    assert said[0].startswith("error[link-carries]: rank 1 (dp1): waits in all_reduce grads, and")


def test_it_says_nothing_while_others_can_be_asked_or_all_ends_answer(
    ring: FingerprintRing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    now = time.monotonic()
    monkeypatch.setattr(exchange, "own_connections", lambda: Connections(stalled=(STALLED,)))
    rank_alone(ring, said, ticked_at=now + 99.0).look(now + 100.0)
    for known in (Connections(), None):
        monkeypatch.setattr(exchange, "own_connections", lambda known=known: known)
        rank_alone(ring, said, ticked_at=now).look(now + 100.0)
    ring.go_on(1)
    monkeypatch.setattr(exchange, "own_connections", lambda: Connections(stalled=(STALLED,)))
    rank_alone(ring, said, ticked_at=now).look(now + 100.0)
    assert said == []
    assert capsys.readouterr().err == ""
