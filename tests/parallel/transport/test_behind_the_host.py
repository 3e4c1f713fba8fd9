"""Ranks whose hosts run ahead of their devices, as over NCCL: what the devices stand at counts.

No GPU is used: works and marks are made up, and hang where they are told to. What ranks write into
their rings, what their progress tells, and the verdict over both are the real ones.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import cast

import pytest

from echelon.core.event import NoEvents
from echelon.launch.context import RankProgress
from echelon.launch.desync.findings import Finding, Verdict
from echelon.launch.desync.fingerprint import RankEvidence
from echelon.launch.desync.ring import DEVICE_READ, FingerprintRing, RingReader
from echelon.launch.desync.verdict import find_mismatch, find_stall
from echelon.launch.local.desync_watch import KnownRank, evidence_of
from echelon.launch.local.messages import ThreadStacks
from echelon.parallel.transport.recorder import CudaClock, Recorder
from tests.parallel.transport.test_fingerprints import MadeUpMembers

GROUPS = {"dp": (0, 1, 2), "pair": (2, 3)}


class MadeUpWork:
    """Work of a device, which has come past it or not."""

    def __init__(self, *, done: bool) -> None:
        """Be done, or never."""
        self.done = done

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self.done

    def query(self) -> bool:
        """Return whether a mark behind it is passed."""
        return self.done


class Queue:
    """The queue of a device: a mark in it is passed when the work before it is done."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.last = MadeUpWork(done=True)

    def mark(self) -> MadeUpWork:
        """Put a mark behind the last work."""
        return self.last

    def on_device(self) -> nullcontext[None]:
        """There is one device."""
        return nullcontext()


class HostAhead:
    """A rank whose host has issued all of `calls`, and whose device hangs at one of them."""

    def __init__(self, folder: Path, rank: int, calls: list[str], hangs_at: str | None) -> None:
        """Issue each call as ``group name``; the device comes past those before `hangs_at`."""
        self.rank, self.progress, queue = rank, RankProgress(), Queue()
        self.progress.ring = FingerprintRing(folder / f"ring{rank}")
        self.recorder = Recorder(rank, NoEvents(), self.progress, clock=cast(CudaClock, queue))
        members = {name: MadeUpMembers(name, ranks=ranks) for name, ranks in GROUPS.items()}
        done = True
        for call in calls:
            group, name = call.split()
            done = done and name != hangs_at
            number = self.recorder.begun(members[group], group, "all_reduce", name, None)
            queue.last = MadeUpWork(done=done)
            operation = self.recorder.issued(name, queue.last, number)
            with self.recorder.waiting(name, number):
                self.recorder.awaited(operation)

    def evidence(self, *, reads: bool = True) -> RankEvidence:
        """Return what is known while the host reads a value of its device, or does something."""
        assert self.progress.ring is not None
        reader = RingReader(self.progress.ring.path)
        with ExitStack() as stack:
            if reads:
                stack.enter_context(self.recorder.reading("the loss"))
                assert reader.wait()[0] == DEVICE_READ
            stacks = ThreadStacks(
                text="", waiting=self.progress.waiting, unfinished=self.progress.unfinished
            )
            known = KnownRank(
                rank=self.rank,
                label=f"r{self.rank}",
                activity=None,
                doing="",
                waiting=self.progress.waiting,
                stacks=stacks,
            )
            found = evidence_of(known, reader, time.monotonic() + 9.0)
        reader.close()
        return found


def decided(ranks: list[RankEvidence]) -> Verdict:
    """Return what is wrong."""
    found = find_mismatch(ranks) or find_stall(ranks)
    assert found is not None
    return found


ALL = ["dp a", "dp b", "dp c"]


def test_a_call_that_was_skipped_is_found_however_far_hosts_are(tmp_path: Path) -> None:
    ranks = [HostAhead(tmp_path, rank, ALL, "b").evidence() for rank in (0, 1)]
    ranks.append(HostAhead(tmp_path, 2, ["dp a", "dp c"], "c").evidence())
    found = decided(ranks)
    assert found.odd == (2,)
    assert found.its is not None
    assert found.theirs is not None
    assert (found.its.name, found.theirs.name) == ("c", "b")


def test_hosts_that_are_ahead_wait_for_one_that_computes(tmp_path: Path) -> None:
    ranks = [HostAhead(tmp_path, rank, ALL, "b").evidence() for rank in (0, 1)]
    ranks.append(HostAhead(tmp_path, 2, ["dp a"], None).evidence(reads=False))
    assert [one.waits_for for one in ranks] == [2, 2, None]
    found = decided(ranks)
    assert (found.finding, found.odd, found.others) == (Finding.LATE, (2,), (0, 1))
    assert found.theirs is not None
    assert found.theirs.name == "b", "and not the last one that hosts have issued"


def test_what_was_issued_behind_an_unfinished_operation_has_not_begun(tmp_path: Path) -> None:
    ranks = [HostAhead(tmp_path, rank, ALL, "b").evidence() for rank in (0, 1)]
    # Rank 2 has issued b, but its device stands before it, and waits for rank 3.
    ranks.append(HostAhead(tmp_path, 2, ["dp a", "pair x", "dp b", "dp c"], "x").evidence())
    ranks.append(HostAhead(tmp_path, 3, [], None).evidence(reads=False))
    assert ranks[2].counts_until == 2
    found = decided(ranks)
    assert (found.finding, found.odd, found.others) == (Finding.LATE, (3,), (2,))


def test_devices_that_all_stand_at_one_operation_have_no_link(tmp_path: Path) -> None:
    ranks = [HostAhead(tmp_path, rank, ALL, "b").evidence() for rank in (0, 1, 2)]
    found = decided(ranks)
    assert (found.finding, found.odd) == (Finding.LINK, (0, 1, 2))
    assert found.theirs is not None
    assert found.theirs.name == "b"


@pytest.mark.parametrize("reads", [True, False])
def test_a_device_that_is_past_all_of_them_waits_for_nobody(tmp_path: Path, reads: bool) -> None:
    one = HostAhead(tmp_path, 0, ALL, None).evidence(reads=reads)
    assert one.waiting is None
    assert find_stall([one]) is None
