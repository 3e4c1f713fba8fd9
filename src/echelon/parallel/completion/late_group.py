# SPDX-License-Identifier: Apache-2.0
"""Collectives and messages that complete when they are awaited, and not before.

The transport works on private copies in the background, so that nothing waits longer than it would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from echelon.parallel.completion.in_flight import (
    ALL_GATHER,
    InFlight,
    LateOperation,
    OperationName,
    Pair,
)
from echelon.parallel.completion.late_memory import LateBufferPool
from echelon.parallel.completion.memory import private_copy, without
from echelon.parallel.transport.collectives import Group, Pending, ReduceOp, require_contiguous
from echelon.parallel.transport.communicator import Communicator
from echelon.parallel.transport.recorder import Recorder


class LatePending(Pending):
    """A collective whose result appears in `wait`."""

    __slots__ = ("_flight", "_operation", "_real")

    def __init__(self, real: Pending, operation: LateOperation, flight: InFlight) -> None:
        """Hold what really is under way."""
        super().__init__()
        self._real, self._operation, self._flight = real, operation, flight

    def done(self) -> bool:
        """Return whether `wait` would return at once, or, at random, that it is not known yet."""
        return self._real.done() and self._flight.random.random() < 1 / 2

    def wait(self) -> None:
        """Return when the result is there; a second call returns at once."""
        self._flight.land(self._operation)


class LateGroup(Group):
    """A group whose collectives complete late."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        recorder: Recorder,
        flight: InFlight,
    ) -> None:
        """Hold the group of `ranks` that the recorder's rank belongs to."""
        super().__init__(axis, ranks, recorder.rank, communicator, recorder)
        self._flight = flight
        self._buffer_pool = LateBufferPool(torch.device("cpu"), flight)

    def all_reduce(
        self, tensor: torch.Tensor, *, name: str, async_op: bool = False, op: ReduceOp = "sum"
    ) -> Pending:
        """Sum `tensor` over the group, or find the largest of each element, in place."""
        if self.size == 1:
            return Pending()
        require_contiguous(name, tensor)
        private = private_copy(tensor)
        real = super().all_reduce(private, name=name, async_op=True, op=op)
        return self._late("all_reduce", name, real, [], [(tensor, private)], async_op)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Fill `whole` [n * piece, ...] with the pieces of all ranks, in group order."""
        if self.size == 1:
            return super().all_gather(whole, shard, name=name, async_op=async_op)
        require_contiguous(name, whole, shard)
        landing, sent = torch.empty_like(whole), private_copy(shard)
        real = super().all_gather(landing, sent, name=name, async_op=True)
        return self._late(ALL_GATHER, name, real, [(shard, sent)], [(whole, landing)], async_op)

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Fill `shard` with this rank's part of the sum of `whole` over the group."""
        if self.size == 1:
            return super().reduce_scatter(shard, whole, name=name, async_op=async_op)
        require_contiguous(name, whole, shard)
        landing, sent = torch.empty_like(shard), private_copy(whole)
        real = super().reduce_scatter(landing, sent, name=name, async_op=True)
        reads = _apart(whole, sent, shard)
        return self._late("reduce_scatter", name, real, reads, [(shard, landing)], async_op)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Send part i of `sent` to member i; its part is i of `received`."""
        if self.size == 1:
            return super().all_to_all(received, sent, name=name, async_op=async_op)
        require_contiguous(name, received, sent)
        landing, leaving = torch.empty_like(received), private_copy(sent)
        real = super().all_to_all(landing, leaving, name=name, async_op=True)
        return self._late(
            "all_to_all", name, real, [(sent, leaving)], [(received, landing)], async_op
        )

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, name: str
    ) -> Pending:
        """Start to send and receive flat tensors of any sizes, by the place of the other member."""
        if self.size == 1:
            return Pending()
        require_contiguous(name, *sends.values(), *receives.values())
        leaving = {place: private_copy(tensor) for place, tensor in sends.items()}
        landing = {place: torch.empty_like(tensor) for place, tensor in receives.items()}
        real = super().exchange(leaving, landing, name=name)
        reads = [(tensor, leaving[place]) for place, tensor in sends.items()]
        writes = [(tensor, landing[place]) for place, tensor in receives.items()]
        return self._late("exchange", name, real, reads, writes, True)

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Send `tensor` to member `index` of the group; it must live until `wait`."""
        require_contiguous(name, tensor)
        private = private_copy(tensor)
        real = super().send(private, index, name=name, tag=tag)
        return self._late("send", name, real, [(tensor, private)], [], True)

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Receive into `tensor` from member `index` of the group."""
        require_contiguous(name, tensor)
        private = torch.empty_like(tensor)
        real = super().receive(private, index, name=name, tag=tag)
        return self._late("receive", name, real, [], [(tensor, private)], True)

    def _late(
        self,
        kind: str,
        name: str,
        real: Pending,
        reads: Sequence[Pair],
        writes: Sequence[Pair],
        async_op: bool,
    ) -> Pending:
        what = OperationName(kind=kind, name=name, axis=self.axis)
        operation = self._flight.begin(what, real.wait, reads=reads, writes=writes)
        pending = LatePending(real, operation, self._flight)
        if not async_op:
            pending.wait()
        return pending


def _apart(whole: torch.Tensor, copy: torch.Tensor, shard: torch.Tensor) -> list[Pair]:
    """Return the parts of `whole` that are not in `shard`, each with its copy.

    A reduce-scatter in place fills a part of what it reads.
    """
    flat, flat_copy = whole.view(-1), copy.view(-1)
    parts: list[Pair] = []
    for part in without(flat, [shard]):
        start = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
        parts.append((part, flat_copy[start : start + part.numel()]))
    return parts
