"""What ranks run in these tests: they imitate NCCL, whose waits return before anything is done."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist

from echelon.core.event import NoEvents
from echelon.launch.context import RankContext
from echelon.parallel.transport.collectives import Pending
from echelon.parallel.transport.recorder import CudaClock, Recorder


class DeviceQueue:
    """The queue of a device: what it is told to wait for, it waits for in that order."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.works: list[dist.Work] = []

    def on_device(self) -> AbstractContextManager[None]:
        """There is one device."""
        return nullcontext()

    def mark(self) -> QueueMark:
        """Put a mark behind what is there."""
        return QueueMark(self.works[:])

    def drain(self) -> None:
        """Do what a read does: wait for all of it."""
        for work in self.works:
            work.wait()


class QueueMark:
    """A place in the queue."""

    def __init__(self, before: list[dist.Work]) -> None:
        """Stand behind these."""
        self._before = before

    def query(self) -> bool:
        """Return whether all before it is done."""
        return all(work.is_completed() for work in self._before)


class QueuedWork:
    """A collective for which the device waits, and the host does not."""

    def __init__(self, work: dist.Work, queue: DeviceQueue) -> None:
        """Hold the work of Gloo."""
        self._work, self._queue = work, queue

    def wait(self) -> None:
        """Let the device wait."""
        self._queue.works.append(self._work)

    def is_completed(self) -> bool:
        """Return whether the device has done it."""
        return self._work.is_completed()


def read_what_never_comes(context: RankContext, argument: Any) -> None:
    """Have each rank call a collective to which the other never comes, then read a value.

    Rank 0 is late in the order of the work, rank 1 early: so it is rank 1 that nobody came to.
    """
    ranks = list(range(context.world_size))
    groups = [dist.new_group(ranks) for _ in ranks]
    together = dist.new_group(ranks)
    queue = DeviceQueue()
    recorder = Recorder(context.rank, NoEvents(), context.progress, clock=cast(CudaClock, queue))
    context.progress.mark("step 1")
    for name, group in (("the first", together), ("the second", groups[context.rank])):
        recorder.at(f"F{context.rank}.0", 10 - context.rank)
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert work is not None
        queued = cast(dist.Work, QueuedWork(work, queue))
        Pending(queued, name=name, recorder=recorder).wait()
    recorder.at("", None)
    with recorder.reading("the loss"):
        queue.drain()
