"""Two ranks that meet through the store, whenever both are there: no other rank takes part.

A process group of torch is joined by all ranks of the run at once, and cannot be left or joined
later. A pair of this kind can: when one end is lost the other gets an error from its next message,
and meets the rank that was started again in a new pair.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from echelon.launch.process_group import Store
from echelon.parallel.transport.collectives import Group, Pending, require_contiguous
from echelon.parallel.transport.recorder import Recorder

MEETS_WITHIN_S = 30.0
"""Seconds in which the second end must come, once the first is there."""


class Pair(Group):
    """Send and receive between two ranks over Gloo; a message may take `message_s` to come."""

    def __init__(
        self, axis: str, ranks: tuple[int, int], recorder: Recorder, store: Store, message_s: float
    ) -> None:
        """Meet the other end at `store`, which both give alike and nobody used before.

        RuntimeError where it does not come in time.
        """
        super().__init__(axis, ranks, recorder.rank, None, recorder)
        self._limit = timedelta(seconds=message_s)
        limit = timedelta(seconds=MEETS_WITHIN_S)
        self._ends: Any = ProcessGroupGloo(store, self.index, len(ranks), limit)

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Send `tensor` to the other end; it must live until `wait`."""
        require_contiguous(name, tensor)
        start = self.recorder.now()
        work = cast(dist.Work, _Patient(self._ends.send([tensor], index, tag), self._limit))
        record = self._event("send", name, tensor.nbytes, start, microbatch=tag)
        return self._pending(work, name, record, True, 0)

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Receive into `tensor` from the other end."""
        require_contiguous(name, tensor)
        work = cast(dist.Work, _Patient(self._ends.recv([tensor], index, tag), self._limit))
        return Pending(work, self.recorder.received, name=name, recorder=self.recorder)


class _Patient:
    """Wait for a message longer than for the other end."""

    def __init__(self, work: dist.Work, limit: timedelta) -> None:
        self._inner, self._limit = work, limit

    def is_completed(self) -> bool:
        """Return whether the message is known to have come."""
        return self._inner.is_completed()

    def wait(self) -> None:
        """Return when the message has come; RuntimeError where the other end is lost."""
        self._inner.wait(self._limit)
