"""What operations leave in the ring of their rank: numbers, forms, and the line that called."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.launch.context import RankProgress
from echelon.launch.desync.ring import DEVICE_READ, FingerprintRing, RingReader
from echelon.parallel.transport.fingerprints import OperationFingerprints
from echelon.parallel.transport.messages import PendingWorks
from echelon.parallel.transport.recorder import Recorder


@dataclass(slots=True)
class MadeUpMembers:
    """Ranks that nothing has joined."""

    name: str = "dp.2"
    called: str = ""
    ranks: tuple[int, ...] = (0, 1)
    sequences: dict[tuple[int, int] | None, int] = field(
        default_factory=dict[tuple[int, int] | None, int]
    )


@pytest.fixture
def ring(tmp_path: Path) -> FingerprintRing:
    """Return an empty ring."""
    return FingerprintRing(tmp_path / "ring")


def test_sequence_numbers_count_in_each_channel(ring: FingerprintRing) -> None:
    prints, members, other = OperationFingerprints(ring), MadeUpMembers(), MadeUpMembers()
    one = torch.zeros(2, 3)
    prints.task = "F0.1"
    prints.issue(members, "dp", "all_reduce", "grads", one)
    prints.issue(members, "dp", "send", "act", one, (0, 1))
    prints.issue(members, "dp", "receive", "act", one, (1, 0))
    prints.issue(members, "world", "all_gather", "norm", one.to(torch.int64))
    prints.issue(other, "dp", "exchange", "rows", None)
    found = RingReader(ring.path).read().fingerprints
    assert [each.number for each in found] == [1, 2, 3, 4, 5]
    assert [each.sequence for each in found] == [1, 1, 1, 2, 1]
    assert [each.axis for each in found] == ["dp", "dp", "dp", "world", "dp"]
    assert [each.group for each in found] == ["dp.2"] * 4 + ["dp.2, number 2"]
    assert [each.ends for each in found] == [None, (0, 1), (1, 0), None, None]
    assert (found[0].shape, found[0].dtype, found[0].task) == ((2, 3), "float32", "F0.1")
    assert (found[3].dtype, found[4].shape, found[4].dtype) == ("int64", (), "")


def test_the_line_is_the_one_outside_of_the_transport(ring: FingerprintRing) -> None:
    progress = RankProgress()
    progress.ring = ring
    recorder = Recorder(0, NoEvents(), progress)
    for _ in range(2):
        recorder.begun(MadeUpMembers(), "dp", "all_reduce", "grads", None)
    recorder.begun(MadeUpMembers(), "dp", "all_reduce", "grads", None)
    sites = [each.site for each in RingReader(ring.path).read().fingerprints]
    assert sites[0] == sites[1] != sites[2]
    name = "in test_the_line_is_the_one_outside_of_the_transport"
    assert all(site.startswith("test_fingerprints.py:") and site.endswith(name) for site in sites)


def test_a_wait_and_its_end_are_noted(ring: FingerprintRing) -> None:
    progress = RankProgress()
    progress.ring = ring
    recorder, reader = Recorder(0, NoEvents(), progress), RingReader(ring.path)
    number = recorder.begun(MadeUpMembers(), "dp", "all_reduce", "grads", None)
    with recorder.waiting("grads", number):
        assert reader.read().waits_for == number
    assert reader.read().waits_for is None
    assert reader.read().fingerprints[0].ended
    # What is raised stays where it was raised: the rank still stands there, for all that is known.
    second = recorder.begun(MadeUpMembers(), "dp", "all_reduce", "grads", None)
    with pytest.raises(RuntimeError), recorder.waiting("grads", second):
        raise RuntimeError("connection reset")
    assert reader.read().waits_for == second
    assert not reader.read().fingerprints[1].ended
    progress.mark("step 9")
    assert reader.read().doing == "step 9"


def test_of_messages_the_awaited_member_is_noted(ring: FingerprintRing) -> None:
    reader = RingReader(ring.path)
    awaited: list[int | None] = []

    class Work:
        def wait(self) -> None:
            awaited.append(reader.read().awaits)

    progress = RankProgress()
    progress.ring = ring
    works = PendingWorks([Work(), Work()], (), (3, 1))  # type: ignore[list-item]
    Recorder(0, NoEvents(), progress).wait_for(works, 1)
    Recorder(0, NoEvents(), progress).wait_for(works, 0)
    Recorder(0, NoEvents()).wait_for(works, 0)
    assert awaited[:2] == [3, 1]
    assert len(awaited) == 6


def test_without_a_ring_nothing_is_noted() -> None:
    recorder = Recorder(0, NoEvents(), RankProgress())
    assert recorder.begun(MadeUpMembers(), "dp", "all_reduce", "grads", None) == 0
    assert Recorder(0, NoEvents()).begun(None, "dp", "all_reduce", "grads", None) == 0


def test_a_read_of_the_device_is_noted(ring: FingerprintRing) -> None:
    prints = OperationFingerprints(ring)
    prints.read_device()
    assert RingReader(ring.path).wait()[0] == DEVICE_READ
    prints.go_on(0)
    assert RingReader(ring.path).wait() == (0, 0.0)
