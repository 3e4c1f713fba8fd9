# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet through the store, whenever all of them are there: no other rank takes part.

A process group of torch is joined by all ranks of the run at once, and cannot be left or joined
later. A group of this kind can: when a member is lost the others get an error from their next
operation, and meet the rank that was started again, or go on without it, in a new group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from echelon.cost.bytes.terms import all_reduce_bytes
from echelon.launch.process_group import Store
from echelon.parallel.transport.collectives import Group, Pending, ReduceOp, require_contiguous
from echelon.parallel.transport.recorder import Recorder

MEETS_WITHIN_S = 30.0
"""Seconds in which all members must come, once the first is there."""


LOOKS_EVERY_S = 0.5
"""Seconds for which a sum is waited for before it is asked who is lost."""


class StoreGroup(Group):
    """Ranks that talk over Gloo; an operation may take `message_s`."""

    def __init__(
        self, axis: str, ranks: Sequence[int], recorder: Recorder, store: Store, message_s: float
    ) -> None:
        """Meet the other members at `store`, which all give alike and nobody used before.

        RuntimeError where one does not come in time.
        """
        super().__init__(axis, ranks, recorder.run_rank, None, recorder)
        self._limit = timedelta(seconds=message_s)
        limit = timedelta(seconds=MEETS_WITHIN_S)
        self._ends: Any = None
        self._is_lost: Callable[[], bool] = lambda: False
        if len(ranks) > 1:
            self._ends = ProcessGroupGloo(store, self.index, len(ranks), limit)

    def lose_by(self, is_lost: Callable[[], bool]) -> None:
        """Ask `is_lost` while a sum is waited for: a connection may not tell that its end died."""
        self._is_lost = is_lost

    def all_reduce(
        self, tensor: torch.Tensor, *, name: str, async_op: bool = False, op: ReduceOp = "sum"
    ) -> Pending:
        """Sum `tensor` over the members in place; RuntimeError where one is lost."""
        if self.size == 1:
            return Pending()
        require_contiguous(name, tensor)
        assert op == "sum", "members find no largest numbers"
        start = self.recorder.now()
        options = dist.AllreduceOptions()
        options.timeout = self._limit
        started = self._ends.allreduce([tensor], options)
        work = _Watchful(started, self._limit, self._is_lost)
        sent = all_reduce_bytes(tensor.nbytes, self.size)
        record = self._event("all_reduce", name, sent, start, self._far_of_sum(tensor))
        return self._pending(cast(dist.Work, work), name, record, async_op, 0)

    def close(self) -> None:
        """Leave: members that wait for this one get an error."""
        self._ends = None

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Send `tensor` to a member; it must live until `wait`."""
        require_contiguous(name, tensor)
        start = self.recorder.now()
        work = cast(dist.Work, _Patient(self._ends.send([tensor], index, tag), self._limit))
        far = self._far_of_exchange({index: tensor})
        record = self._event("send", name, tensor.nbytes, start, far, microbatch=tag)
        return self._pending(work, name, record, True, 0)

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Receive into `tensor` from a member."""
        require_contiguous(name, tensor)
        work = cast(dist.Work, _Patient(self._ends.recv([tensor], index, tag), self._limit))
        return Pending(work, self.recorder.received, name=name, recorder=self.recorder)


class _Patient:
    """Wait for an operation longer than for other members to come."""

    def __init__(self, work: dist.Work, limit: timedelta) -> None:
        self._inner, self._limit = work, limit

    def is_completed(self) -> bool:
        """Return whether the operation is known to have ended."""
        return self._inner.is_completed()

    def wait(self) -> None:
        """Return when it has ended; RuntimeError where a member is lost."""
        self._inner.wait(self._limit)


class _Watchful(_Patient):
    """Wait for a sum while all members live."""

    def __init__(self, work: dist.Work, limit: timedelta, is_lost: Callable[[], bool]) -> None:
        super().__init__(work, limit)
        self._is_lost = is_lost

    def wait(self) -> None:
        """Return when it has ended; RuntimeError where a member is lost, or it takes too long."""
        until = time.monotonic() + self._limit.total_seconds()
        while True:
            try:
                self._inner.wait(timedelta(seconds=LOOKS_EVERY_S))
                return
            except RuntimeError:
                # It says as much of a wait that was too short as of a sum that failed.
                over = self._is_lost() or time.monotonic() > until
                if self._inner.is_completed() or over:
                    raise
