# SPDX-License-Identifier: Apache-2.0
"""Memory that completes late: pools and buffers that are poisoned when free, and host copies.

Memory that is used while it is free is told of by name. Copies between host and device are done
when somebody waits for their end, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from echelon.parallel.completion.in_flight import InFlight, LateOperation, OperationName
from echelon.parallel.completion.memory import private_copy
from echelon.parallel.offload.buffers import Allocate, BoundedBuffers
from echelon.parallel.offload.copy_streams import (
    CompletedEvent,
    CopyDirection,
    CopyStreams,
    StreamEvent,
    TensorCopy,
)
from echelon.parallel.tensor_memory import BufferPool

Owner = TypeVar("Owner")


class LateBufferPool(BufferPool):
    """Pieces of memory that flat tensors use in turn, each poisoned in between."""

    def __init__(self, device: torch.device, flight: InFlight) -> None:
        """Begin with none, on `device`."""
        super().__init__(device)
        self._flight = flight

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a piece that is large enough."""
        piece = super().take(num_bytes)
        self._flight.lend(piece)
        return piece

    def give_back(self, piece: torch.Tensor) -> None:
        """Take a piece that was lent; one that is free already would have two owners next time."""
        if self._flight.free(piece):
            super().give_back(piece)


class LateBuffers(BoundedBuffers[Owner]):
    """A bounded number of buffers, each poisoned while nobody has it."""

    def __init__(self, count: int, allocate: Allocate, flight: InFlight) -> None:
        """Allocate nothing yet."""
        super().__init__(count, allocate)
        self._flight = flight

    def take(self, size: int, owner: Owner) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes, or None while all are taken."""
        before = list(self._free)
        buffer = super().take(size, owner)
        for one in before:
            # Those that are too small are gone for good, and others may get their addresses.
            if not any(one is left for left in self._free):
                self._flight.lend(one)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._flight.free(buffer)
        super().give_back(buffer)

    def clear(self) -> None:
        """Forget all buffers."""
        for buffer in self._free:
            self._flight.lend(buffer)
        super().clear()


class LateCopyEnd(CompletedEvent):
    """The mark of the end of a copy, which ends when it is waited for."""

    def __init__(self, land: Callable[[], None]) -> None:
        """Hold what ends the copy and all those before it in its direction."""
        self._land = land

    def synchronize(self) -> None:
        """Return when the copy has ended."""
        self._land()


class LateCopyStreams(CopyStreams):
    """Copies that end late, those of a direction in the order in which they were asked for."""

    def __init__(self, flight: InFlight, what: str) -> None:
        """Copy `what` it is that rests on the host, by name."""
        self._flight, self._what = flight, what
        self._queues: dict[CopyDirection, deque[LateOperation]] = {"up": deque(), "down": deque()}

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Start to copy once the marks are passed; return the mark of the end."""
        for mark in after:
            mark.synchronize()
        with self._flight.unwatched():
            sources = [(source.detach(), private_copy(source)) for _, source in copies]
        operation = self._flight.begin(
            OperationName(kind=f"copy {direction}", name=self._what, axis="host"),
            lambda: None,
            reads=sources,
            writes=[(target, copy) for (target, _), (_, copy) in zip(copies, sources, strict=True)],
            must_wait=False,
        )
        queue = self._queues[direction]
        queue.append(operation)

        def land() -> None:
            while not operation.landed and queue:
                self._flight.land(queue.popleft())

        return LateCopyEnd(land)

    def wait_for(self, mark: StreamEvent) -> None:
        """End what the computation waits for."""
        mark.synchronize()
