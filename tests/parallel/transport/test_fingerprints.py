"""What operations leave in the ring of their rank: numbers, forms, and the line that called."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.launch.context import RankProgress
from echelon.launch.desync.ring import DEVICE_READ, FingerprintRing, RingReader
from echelon.launch.local.messages import Limits
from echelon.launch.local.supervisor import LaunchOptions, run_ranks
from echelon.parallel.transport.fingerprints import OperationFingerprints, UnfinishedOperations
from echelon.parallel.transport.messages import PendingWorks
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.transport import unfinished_targets


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


class Work:
    """An operation under way."""

    def __init__(self) -> None:
        """Begin."""
        self.done = False

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self.done


class Mark:
    """A mark that is passed when it is told so, and that fails where the device has."""

    def __init__(self) -> None:
        """Stand in the queue."""
        self.passed, self.failed = False, False

    def query(self) -> bool:
        """Return whether it is passed."""
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.passed


def test_the_oldest_that_has_not_ended_is_told() -> None:
    marks: list[Mark] = []

    def mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    def oldest() -> tuple[str, int | None] | None:
        found = operations.oldest()
        return None if found is None else (found.name, found.turn)

    operations = UnfinishedOperations(mark, nullcontext)
    assert oldest() is None
    works = [Work(), Work(), Work()]
    first, second, third = (
        operations.issued(f"sum {place}", place, work) for place, work in enumerate(works)
    )
    assert oldest() == ("sum 0", 0)
    works[0].done = True
    assert oldest() == ("sum 1", 1)
    operations.awaited(second)
    works[1].done = True
    assert oldest() == ("sum 1", 1), "the device is not past it, whatever the others are"
    marks[0].passed = True
    assert oldest() == ("sum 2", 2)
    operations.awaited(third)
    marks[1].failed = True
    assert oldest() == ("sum 2", 2)
    marks[1].failed, marks[1].passed = False, True
    operations.awaited(first)
    marks[2].passed = True
    assert oldest() is None


def test_the_work_of_what_was_awaited_is_let_go() -> None:
    operations = UnfinishedOperations(Mark, nullcontext)
    work = Work()
    held = weakref.ref(work)
    operation = operations.issued("sum", None, work)
    del work
    assert held() is not None
    operations.awaited(operation)
    gc.collect()
    assert held() is None, "it would keep the tensors that it wrote"


def test_ranks_that_hang_in_a_read_are_told_by_their_operations(tmp_path: Path) -> None:
    outcome = run_ranks(
        unfinished_targets.read_what_never_comes,
        {},
        world_size=2,
        labels=("pp0", "pp1"),
        log_dir=tmp_path,
        options=LaunchOptions(limits=Limits(step_s=2.0)),
    )
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.rules) == (1, ("rank-stuck",))
    said = "it waits in the second at F1.0 (the host reads the loss)"
    assert said in outcome.failure.fault.summary
