"""The ring: what is written is read, by another process too, whatever became of the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.launch.desync import ring
from echelon.launch.desync.ring import (
    NOTHING,
    RING_BYTES,
    SLOTS,
    FingerprintRing,
    RingReader,
    new_ring,
    remove_ring,
    ring_folder,
    ring_path,
)


@pytest.fixture
def written(tmp_path: Path) -> FingerprintRing:
    """Return an empty ring."""
    return FingerprintRing(ring_path(tmp_path, 1, 0))


def issue(one: FingerprintRing, sequence: int, name: str = "grads", **ends: int) -> int:
    """Write a fingerprint."""
    return one.issue(
        (
            one.group("dp.2", "dp", (0, 2, 4, 6)),
            sequence,
            one.text("all_reduce"),
            one.text(name),
            one.tensor((4, 8), "float32"),
            one.text("data.py:7 in start"),
            one.text("F0.1"),
            ends.get("source", -1),
            ends.get("target", -1),
        )
    )


def test_what_is_written_is_read(written: FingerprintRing) -> None:
    first, second = issue(written, 1), issue(written, 2, "loss", source=0, target=2)
    written.mark("step 7")
    written.wait(second)
    written.awaits(second, 2, 5.5)
    found = RingReader(written.path).read()
    assert (found.waits_for, found.waits_since, found.awaits) == (second, 5.5, 2)
    assert found.doing == "step 7"
    one, other = found.fingerprints
    assert (one.number, one.sequence, one.kind, one.name) == (first, 1, "all_reduce", "grads")
    assert (one.group, one.axis, one.ranks) == ("dp.2", "dp", (0, 2, 4, 6))
    assert (one.shape, one.dtype, one.site, one.task) == (
        (4, 8),
        "float32",
        "data.py:7 in start",
        "F0.1",
    )
    assert (one.ends, one.ended, other.ends) == (None, False, (0, 2))
    written.go_on(first)
    again = RingReader(written.path).read()
    assert (again.waits_for, again.awaits) == (None, None)
    assert [each.ended for each in again.fingerprints] == [True, False]


def test_the_last_operations_stay(written: FingerprintRing) -> None:
    for sequence in range(1, 2 * SLOTS + 4):
        issue(written, sequence)
    found = RingReader(written.path).read().fingerprints
    # The slot of the oldest may be the next to be written: it is left out.
    assert [one.number for one in found] == list(range(SLOTS + 5, 2 * SLOTS + 4))
    assert [one.sequence for one in found] == [one.number for one in found]
    assert len(RingReader(written.path).read(most=10).fingerprints) == 10
    # One that has left the ring is not marked as ended, in the slot of another.
    written.go_on(3)
    assert not any(one.ended for one in RingReader(written.path).read().fingerprints)


def test_a_full_table_tells_nothing_rather_than_something_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "RING_BYTES", ring._TABLE_AT + 200)  # pyright: ignore
    small = FingerprintRing(tmp_path / "ring")
    issue(small, 1)
    assert len(RingReader(small.path).read().fingerprints) == 1
    issue(small, 2, name="a name " * 40)
    assert RingReader(small.path).read() == NOTHING


@pytest.mark.parametrize(
    "ranks", [(0,), (0, 1, 2), (3, 7, 11), (0, 1, 8, 9), (5, 2, 1), tuple(range(0, 4096, 2))]
)
def test_ranks_are_kept_as_ranges(written: FingerprintRing, ranks: tuple[int, ...]) -> None:
    group = written.group("dp", "dp", ranks)
    written.issue((group, 1, 0, 0, 0, 0, 0, -1, -1))
    assert RingReader(written.path).read().fingerprints[0].ranks == ranks


def test_communicators_of_one_name_are_told_apart(written: FingerprintRing) -> None:
    assert written.joined("dp", (0, 1)) == "dp"
    assert written.joined("dp", (0, 1)) == "dp, number 2"
    assert written.joined("dp", (2, 3)) == "dp"


def test_a_ring_outlives_the_process_that_was_killed(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from echelon.launch.desync.ring import FingerprintRing
ring = FingerprintRing(Path(sys.argv[1]))
number = ring.issue((ring.group("dp", "dp", (0, 1)), 1, ring.text("all_reduce"), ring.text("grads"),
                     ring.tensor((3,), "float32"), ring.text("train.py:1 in f"), 0, -1, -1))
ring.wait(number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "ring"
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    found = RingReader(path).read()
    assert [(one.kind, one.name) for one in found.fingerprints] == [("all_reduce", "grads")]
    assert found.waits_for == 1


def test_what_is_no_ring_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"echelon")
    assert RingReader(tmp_path / "short").read() == NOTHING
    assert RingReader(tmp_path / "short").wait() == (0, 0.0)


def test_folders_of_rings_are_removed() -> None:
    with ring_folder() as folder:
        FingerprintRing(ring_path(folder, 1, 3))
    assert not folder.exists()
    alone = new_ring(5)
    assert alone.path.name == "calls-0-rank-0005"
    remove_ring(alone.path)
    assert not alone.path.parent.exists()
    remove_ring(alone.path)


def test_its_memory_is_what_the_guide_says(written: FingerprintRing) -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "hangs.md"
    assert written.path.stat().st_size == RING_BYTES
    assert f"{RING_BYTES:,} bytes of the host's memory" in guide.read_text()
