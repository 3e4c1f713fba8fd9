"""What a rank says that reaches no store: its wait, and which ends are silent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from echelon.launch.desync import alone
from echelon.launch.desync.alone import RankAlone
from echelon.launch.desync.connections import Connections, StalledConnection
from echelon.launch.desync.ring import FingerprintRing
from echelon.launch.local.messages import Limits

STALLED = StalledConnection(
    local="10.0.0.2:7", peer="10.0.0.1:9", packets=3, repeats=4, silent_s=2.5
)


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
    monkeypatch.setattr(alone, "own_connections", lambda: Connections(stalled=(STALLED,)))
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
    monkeypatch.setattr(alone, "own_connections", lambda: Connections(stalled=(STALLED,)))
    rank_alone(ring, said, ticked_at=now + 99.0).look(now + 100.0)
    for known in (Connections(), None):
        monkeypatch.setattr(alone, "own_connections", lambda known=known: known)
        rank_alone(ring, said, ticked_at=now).look(now + 100.0)
    ring.go_on(1)
    monkeypatch.setattr(alone, "own_connections", lambda: Connections(stalled=(STALLED,)))
    rank_alone(ring, said, ticked_at=now).look(now + 100.0)
    assert said == []
    assert capsys.readouterr().err == ""
