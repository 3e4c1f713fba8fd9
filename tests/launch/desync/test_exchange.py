"""Under torchrun: ranks tell their calls in the store, and one compares them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.launch.desync import exchange
from echelon.launch.desync.exchange import DesyncExchange
from echelon.launch.desync.findings import Finding
from echelon.launch.desync.fingerprint import Activity
from echelon.launch.desync.ring import FingerprintRing
from echelon.launch.desync.watch import KnownRank

LABELS = ("dp0", "dp1", "dp2")


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
