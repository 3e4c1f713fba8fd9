"""What a rank under torchrun makes of the beats in the store: one rank here, the other made up."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.launch.context import RankProgress
from echelon.launch.desync.connections import Connections, StalledConnection
from echelon.launch.desync.ring import FingerprintRing
from echelon.launch.launched import exchange, watchdog
from echelon.launch.launched.watchdog import StoreHeartbeat, Watchdog
from echelon.launch.local.messages import Limits
from echelon.launch.process_group import Store
from echelon.launch.root_cause import FaultKind, RankFault

LABELS = ("dp0", "dp1")
HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tick fast, and raise what would end the process."""
    monkeypatch.setattr(watchdog, "WATCHDOG_INTERVAL_S", 0.02)
    monkeypatch.setattr("os._exit", sys.exit)


def watch(store: Store, progress: RankProgress | None = None, **limits: float) -> Watchdog:
    """Return the watchdog of rank 0."""
    progress = progress or RankProgress()
    return Watchdog(store, rank=0, labels=LABELS, progress=progress, limits=Limits(**limits))


def beat(store: Store, **changes: object) -> None:
    """Write the one beat of rank 1 that there will be."""
    usual = StoreHeartbeat(count=1, host=HERE, pid=1, done=False, waits=False, turn=None)
    store.set("beat/1", json.dumps({**asdict(usual), **changes}))


def fault(rank: int, **changes: object) -> RankFault:
    """Return what a rank raised."""
    usual = {"rank": rank, "kind": FaultKind.RAISED, "at": 1.5, "summary": "ValueError: x"}
    return RankFault(**{**usual, **changes})  # type: ignore[arg-type]


def end_of(run: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is said at the end of the process."""
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 4
    return capsys.readouterr().err


def test_the_first_fault_in_the_store_counts() -> None:
    store = HashStore()
    first, second = fault(1), fault(0, at=2.5)
    assert watch(store).publish_fault(first) is first
    found = watch(store).publish_fault(second)
    assert found == first
    assert found.kind is FaultKind.RAISED


def test_a_rank_ends_for_the_fault_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    watch(store).publish_fault(fault(1))
    said = end_of(watch(store).run, capsys)
    assert said == "rank 0 (dp0) stops for rank 1 (dp1): ValueError: x\n"


def test_a_process_of_this_host_that_is_gone_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    gone = subprocess.Popen(["true"])
    gone.wait()
    beat(store, pid=gone.pid)
    said = end_of(watch(store).run, capsys)
    assert "error[rank-killed]: rank 1 (dp1): is gone: it was killed" in said


def test_of_another_host_only_silence_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.05)
    store = HashStore()
    beat(store, host="elsewhere")
    said = end_of(watch(store).run, capsys)
    assert "error[rank-stopped]: rank 1 (dp1): has said nothing for 0.05 s" in said


def test_a_main_thread_that_does_not_move_is_stuck(capsys: pytest.CaptureFixture[str]) -> None:
    store, progress = HashStore(), RankProgress()
    beat(store, done=True)
    progress.mark("step 3")
    said = end_of(watch(store, progress, step_s=0.01).run, capsys)
    assert "error[rank-stuck]: rank 0 (dp0): has not moved for 0 s, last heard of at step 3" in said


def test_where_all_wait_the_first_in_the_order_of_work_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, progress = HashStore(), RankProgress()
    beat(store, host="elsewhere", waits=True, turn=7)
    progress.enter("recv", turn=3)
    said = end_of(watch(store, progress, step_s=0.01).run, capsys)
    assert "and neither has any other rank: it waits in recv" in said


def test_a_full_disk_keeps_no_rank_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError("No space left on device")

    store = HashStore()
    watch(store).publish_fault(fault(1))
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with pytest.raises(SystemExit) as caught:
        watch(store).run()
    assert caught.value.code == 4


def test_a_lost_store_ends_the_rank_unless_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    class Lost(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset")

    said = end_of(watch(Lost()).run, capsys)
    assert said == "rank 0 (dp0) ends: the run's store is gone (Connection reset)\n"
    done = watch(Lost())
    done.finish()
    done.run()
    assert capsys.readouterr().err == ""


def test_the_thread_ends_before_the_process_does() -> None:
    """In the store when Python ends, it would abort the process."""
    watchdog = watch(HashStore())
    watchdog.leave()
    watchdog = watch(HashStore())
    watchdog.start()
    watchdog.finish()
    watchdog.leave()
    assert not watchdog.is_alive()


STALLED = StalledConnection(
    local="10.0.0.1:7", peer="10.0.0.2:9", packets=1, repeats=3, silent_s=2.5
)


def waiting_rank(folder: Path) -> RankProgress:
    """Return the progress of rank 0, which waits for rank 1 in a sum."""
    progress = RankProgress()
    ring = progress.ring = FingerprintRing(folder / "ring")
    group = ring.group("dp", "dp", (0, 1))
    ring.wait(ring.issue((group, 1, ring.text("all_reduce"), ring.text("grads"), 0, 0, 0, -1, -1)))
    progress.enter("grads")
    return progress


def test_a_host_that_is_silent_behind_silent_connections_is_a_cut_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.05)
    monkeypatch.setattr(exchange, "_COLLECT_S", 0.1)
    known = Connections(ends=("10.0.0.1:7",), stalled=(STALLED,))
    monkeypatch.setattr(watchdog, "own_connections", lambda without: known)
    store = HashStore()
    beat(store, host="elsewhere")
    said = end_of(watch(store, waiting_rank(tmp_path), desync_s=60.0).run, capsys)
    assert "error[link-carries]: rank 0 (dp0): and rank 1 (dp1) do not reach each other" in said
    assert "has sent 1 packet to rank 1 (dp1) and again 3 times, from 10.0.0.1:7 to" in said


def test_a_cut_link_is_a_note_until_a_step_is_too_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(exchange, "_COLLECT_S", 0.1)
    monkeypatch.setattr(exchange, "_SOON_S", 0.0)
    monkeypatch.setattr(exchange, "_AGAIN_S", 0.0)
    known = Connections(ends=("10.0.0.1:7",), stalled=(STALLED,))
    monkeypatch.setattr(watchdog, "own_connections", lambda without: known)
    store = HashStore()
    beat(store, host="elsewhere")
    progress = waiting_rank(tmp_path)
    said = end_of(watch(store, progress, desync_s=0.01, step_s=0.5).run, capsys)
    assert said.startswith("note: rank 0 (dp0): and rank 1 (dp1) do not reach each other")
    assert said.count("note: ") == 1
    assert said.index("no error yet") < said.index("error[link-carries]: rank 0 (dp0): and rank 1")
