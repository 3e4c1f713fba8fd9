# SPDX-License-Identifier: Apache-2.0
"""Memory that completes late: pools and buffers that are poisoned when free, copies, and files.

Memory that is used while it is free is told of by name. Copies between host and device are done
when somebody waits for their end, in order.

Of slices in a file nothing is there before it is awaited, and nothing is free before it is written.
Threads read into private memory and write from private memory. A write begins when the caller next
asks for something, so whoever touches a buffer in between does so while it is in flight; the pieces
of one move go in random order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event
from typing import TypeVar

import torch

from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.parallel.completion.in_flight import InFlight, LateOperation, OperationName
from echelon.parallel.completion.memory import poison, private_copy
from echelon.parallel.offload.file_store import (
    FileExtent,
    FileFetch,
    FileOffloadStore,
    FileTransfer,
)
from echelon.parallel.offload.host_memory import (
    Allocate,
    BoundedBuffers,
    CompletedEvent,
    CopyDirection,
    CopyStreams,
    StreamEvent,
    TensorCopy,
    plain_memory,
)
from echelon.parallel.tensor_memory import BufferPool

Owner = TypeVar("Owner")


class LateBufferPool(BufferPool):
    """Pieces of memory that flat tensors use in turn, each poisoned in between."""

    def __init__(self, device: torch.device, flight: InFlight) -> None:
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
        super().__init__(count, allocate)
        self._flight = flight

    def take(self, size: int, owner: Owner) -> torch.Tensor | None:
        before = list(self._free)
        buffer = super().take(size, owner)
        for one in before:
            # Those that are too small are gone for good, and others may get their addresses.
            if not any(one is left for left in self._free):
                self._flight.lend(one)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
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


class LateFileOffloadStore(FileOffloadStore):
    """Rest in a nameless file of a folder; complete late."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_buffers: int,
        flight: InFlight,
        *,
        chunk_bytes: int = TRAINING_PIECES.file_bytes,
    ) -> None:
        """Make the file; EnvironmentProblem where the folder is missing or not writable."""
        super().__init__(folder, rank, num_buffers, chunk_bytes=chunk_bytes)
        self._buffers = LateBuffers[FileFetch](num_buffers, plain_memory, flight)
        self._flight = flight
        self._moves: dict[FileFetch, LateOperation] = {}
        self._held: list[Event] = []

    def view(self, key: str) -> torch.Tensor:
        self._let_go()
        return super().view(key)

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> FileFetch:
        self._let_go()
        return super().fetch(keys, read=read)

    def flush(self) -> None:
        self._let_go()
        super().flush()

    def close(self) -> None:
        """End the threads and free buffers and file."""
        self._let_go()
        super().close()

    def wait_for(self, found: FileFetch) -> list[torch.Tensor]:
        """Return the tensors of a set once they have been read, and let them be seen."""
        self._let_go()
        tensors = super().wait_for(found)
        if found in self._moves:
            self._flight.land(self._moves.pop(found))
        return tensors

    def _start(
        self,
        found: FileFetch,
        parts: Iterable[tuple[FileExtent, torch.Tensor]],
        move: Callable[[FileTransfer], None],
    ) -> None:
        parts = list(parts)
        if not parts and found.buffer is not None:
            with self._flight.unwatched():
                poison(found.buffer)
            return super()._start(found, parts, move)
        private = [(place, _copied(part)) for place, part in parts]
        pairs = [(part, copy) for (_, part), (_, copy) in zip(parts, private, strict=True)]
        reading = found.phase == "reading"
        keys = ", ".join(place.key for place in found.extents)
        operation = self._flight.begin(
            OperationName(kind="read" if reading else "write", name=keys, axis="nvme"),
            lambda: None,
            reads=() if reading else pairs,
            writes=pairs if reading else (),
            must_wait=False,
        )
        self._moves[found] = operation
        go = Event()
        if reading:
            go.set()
        else:
            self._held.append(go)

        def move_then(transfer: FileTransfer) -> None:
            go.wait()
            move(transfer)

        self._flight.random.shuffle(private)
        return super()._start(found, private, move_then)

    def _moved(self, found: FileFetch) -> None:
        """Go on with a set whose last byte has arrived; a write ends here."""
        if found.phase == "writing" and found in self._moves:
            self._flight.land(self._moves.pop(found))
        super()._moved(found)

    def _free(self, found: FileFetch) -> None:
        """Give the buffer of a set to others; what was read into it is not wanted any more."""
        if found.phase != "writing" and found in self._moves:
            self._flight.land(self._moves.pop(found))
        super()._free(found)

    def _let_go(self) -> None:
        """Let the threads write what was put before."""
        for go in self._held:
            go.set()
        self._held.clear()


def _copied(part: torch.Tensor) -> torch.Tensor:
    """Return a copy of bytes that starts at a page, as direct transfers want it."""
    copy = plain_memory(part.numel())
    return copy.copy_(part)
