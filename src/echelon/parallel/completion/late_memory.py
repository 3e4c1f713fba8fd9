# SPDX-License-Identifier: Apache-2.0
"""Memory that completes late: pools and buffers that are poisoned when free, copies, and files.

Memory that is used while it is free is told of by name. Copies between host and device are done
when somebody waits for their end, in order.

Slices of a file are there once they are awaited, and their buffers are free once they are written.
Threads read into private memory and write from private memory. A write begins when the caller next
asks for something, so a buffer that is touched in between is in flight; the pieces of a transfer go
in random order.
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
from echelon.parallel.completion.streams import COMPUTE, Moment, OrderedMark, StreamWork
from echelon.parallel.offload.file_store import (
    FileExtent,
    FileFetch,
    FileOffloadStore,
    FileTransfer,
)
from echelon.parallel.offload.host_memory import (
    Allocate,
    BoundedBuffers,
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


class LateMark(OrderedMark):
    """A point in the work of a stream, such as the end of a copy, which ends when waited for."""

    def __init__(self, flight: InFlight, moment: Moment, land: Callable[[], None]) -> None:
        """Hold the moment; `land` ends the copy and all earlier copies of its direction."""
        super().__init__(flight.order, moment)
        self._flight, self.land = flight, land

    def synchronize(self) -> None:
        """Return when the copy has ended; an observer of a step does not wait for the rank."""
        self.land()
        if self._flight.watches:
            super().synchronize()


class LateCopyStreams(CopyStreams):
    """Copies that end late, those of a direction in the order in which they were asked for."""

    def __init__(self, flight: InFlight, name: str) -> None:
        """Copy slices or activations (`name`)."""
        self._flight, self._name = flight, name
        self._queues: dict[CopyDirection, deque[LateOperation]] = {"up": deque(), "down": deque()}

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Start to copy once the marks are passed; return the mark of the end."""
        order, stream = self._flight.order, f"{self._name} {direction}"
        order.copies_on(stream)
        order.give(stream, *map(self._landed, after))
        with self._flight.unwatched():
            sources = [(source.detach(), private_copy(source)) for _, source in copies]
        operation = self._flight.begin(
            OperationName(kind=f"copy {direction}", name=self._name, axis="host"),
            lambda: None,
            reads=sources,
            writes=[(target, copy) for (target, _), (_, copy) in zip(copies, sources, strict=True)],
            must_wait=False,
            stream=stream,
        )
        queue = self._queues[direction]
        queue.append(operation)

        def land() -> None:
            while not operation.landed and queue:
                self._flight.land(queue.popleft())

        return LateMark(self._flight, operation.end, land)

    def record_event(self) -> StreamEvent:
        """Return the mark of the kernels so far."""
        return LateMark(self._flight, self._flight.order.moment(COMPUTE), _nothing)

    def wait_for(self, mark: StreamEvent) -> None:
        """End the copy that the computation waits for."""
        self._flight.order.wait(COMPUTE, self._landed(mark))

    def record_use(self, tensor: torch.Tensor) -> None:
        """Let the allocator know the copies of a tensor."""
        self._flight.order.record_use(tensor)

    def settle(self) -> None:
        """End the copies to the host for a thread that reads their targets; no stream waits."""
        queue = self._queues["down"]
        while queue:
            self._flight.land(queue.popleft())

    def _landed(self, mark: StreamEvent) -> Moment:
        """End the copy of a mark; return its moment."""
        if not isinstance(mark, LateMark):
            mark.synchronize()
            return {}
        mark.land()
        return mark.moment


def _nothing() -> None:
    """End nothing: kernels are done when they are asked for."""


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
        settle: Callable[[], None] = _nothing,
    ) -> None:
        """Make the file; EnvironmentProblem where the folder is missing or not writable.

        `settle` ends copies into the buffers, whose bytes are taken before threads write them.
        """
        super().__init__(folder, rank, num_buffers, chunk_bytes=chunk_bytes)
        self._buffers = LateBuffers[FileFetch](num_buffers, plain_memory, flight)
        self._flight = flight
        self._moves: dict[FileFetch, LateOperation] = {}
        self._held: list[Event] = []
        self._settle = settle
        self._ends: dict[FileFetch, Moment] = {}
        self._writes: dict[str, FileFetch] = {}
        self._freed: dict[int, Moment] = {}

    def view(self, key: str) -> torch.Tensor:
        self._let_go()
        tensor = super().view(key)
        if self._flight.watches:
            self._knows(self._ends.get(self._writes[key]) if key in self._writes else None)
        return tensor

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> FileFetch:
        fetched = super().fetch(keys, read=read)
        # Writes begin after the fetch, so that none has ended before it.
        self._let_go()
        return fetched

    def flush(self) -> None:
        self._let_go()
        super().flush()

    def close(self) -> None:
        """End the threads and free buffers and file."""
        self._let_go()
        super().close()

    def wait_for(self, fetched: FileFetch) -> list[torch.Tensor]:
        """Return the tensors of a set once they have been read, and let them be seen."""
        self._let_go()
        tensors = super().wait_for(fetched)
        self._knows(self._ends.get(fetched))
        if fetched in self._moves:
            self._flight.land(self._moves.pop(fetched))
        return tensors

    def release(self, fetched: FileFetch) -> None:
        """Give the buffer of a set back; bytes of a read under way are for nobody."""
        super().release(fetched)
        if fetched.dropped:
            self._flight.order.forget(_stream_of(fetched))

    def _start(
        self,
        fetched: FileFetch,
        parts: Iterable[tuple[FileExtent, torch.Tensor]],
        move: Callable[[FileTransfer], None],
    ) -> None:
        parts = list(parts)
        self._ends[fetched] = self._given(fetched)
        if not parts and fetched.buffer is not None:
            with self._flight.unwatched():
                poison(fetched.buffer)
            return super()._start(fetched, parts, move)
        if fetched.phase == "writing":
            self._settle()
        with self._flight.unwatched():
            private = [(place, _copied(part)) for place, part in parts]
        pairs = [(part, copy) for (_, part), (_, copy) in zip(parts, private, strict=True)]
        reading = fetched.phase == "reading"
        keys = ", ".join(place.key for place in fetched.extents)
        operation = self._flight.begin(
            OperationName(kind="read" if reading else "write", name=keys, axis="nvme"),
            lambda: None,
            reads=() if reading else pairs,
            writes=pairs if reading else (),
            must_wait=False,
        )
        self._moves[fetched] = operation
        go = Event()
        if reading:
            go.set()
        else:
            self._held.append(go)

        buffers = {place.key: part for place, part in parts}
        if not reading:
            self._writes.update(dict.fromkeys(buffers, fetched))

        def move_then(transfer: FileTransfer) -> None:
            go.wait()
            move(transfer)
            self._moves_bytes(fetched, transfer, buffers[transfer.key], operation)

        self._flight.random.shuffle(private)
        return super()._start(fetched, private, move_then)

    def _run(
        self, fetched: FileFetch, transfer: FileTransfer, move: Callable[[FileTransfer], None]
    ) -> None:
        """Transfer a piece in a thread, on the stream of its set."""
        with self._flight.order.on(_stream_of(fetched)):
            super()._run(fetched, transfer, move)

    def _may_move(self, transfer: FileTransfer) -> bool:
        """Return once an earlier write of the same key is done, and known: False at the end."""
        may_move = super()._may_move(transfer)
        if transfer.after is not None:
            self._knows(self._ends.get(transfer.after))
        return may_move

    def _moves_bytes(
        self,
        fetched: FileFetch,
        transfer: FileTransfer,
        buffer: torch.Tensor,
        operation: LateOperation,
    ) -> None:
        """Note in a thread that bytes of a file were read into a buffer or written from it."""
        order, stream, name = self._flight.order, _stream_of(fetched), operation.name
        reading = name.kind == "read"
        work = StreamWork(by=str(name), axis=name.axis, at=operation.at)
        order.uses(stream, buffer, work, writes=reading)
        span = transfer.start, transfer.start + len(transfer.memory)
        order.uses_bytes(stream, ((id(self), "file"), span), work, writes=not reading)
        self._ends[fetched] = order.moment(stream)
        if fetched.dropped:
            order.forget(stream)

    def _given(self, fetched: FileFetch) -> Moment:
        """The moment when a set gets work, with the ends that this thread has seen."""
        order, stream = self._flight.order, _stream_of(fetched)
        assert fetched.buffer is not None, "a set that is given work has a buffer"
        order.give(stream, self._freed.get(fetched.buffer.data_ptr(), {}))
        for place in fetched.extents:
            write = self._writes.get(place.key)
            if write is not None and write.left == 0:
                order.wait(stream, self._ends[write])
        return order.moment(stream)

    def _knows(self, moment: Moment | None) -> None:
        """Let this thread know a moment."""
        if moment is not None:
            self._flight.order.wait(self._flight.order.here, moment)

    def _moved(self, fetched: FileFetch) -> None:
        """Go on with a set whose last byte has arrived; a write ends here."""
        if fetched.phase == "writing" and fetched in self._moves:
            self._flight.land(self._moves.pop(fetched))
        super()._moved(fetched)

    def _free(self, fetched: FileFetch) -> None:
        """Give the buffer of a set to others; what was read into it is not wanted any more."""
        if fetched.phase != "writing" and fetched in self._moves:
            self._flight.land(self._moves.pop(fetched))
        assert fetched.buffer is not None, "a set without a buffer is not freed"
        # This thread has seen that others are done with it.
        self._knows(self._ends.get(fetched))
        self._freed[fetched.buffer.data_ptr()] = self._flight.order.moment(self._flight.order.here)
        super()._free(fetched)

    def _let_go(self) -> None:
        """Let the threads write what was put before."""
        for go in self._held:
            go.set()
        self._held.clear()


def _stream_of(fetched: FileFetch) -> str:
    """Return the stream of the threads that move a set one way."""
    return f"{fetched.phase} {id(fetched)}"


def _copied(part: torch.Tensor) -> torch.Tensor:
    """Return a copy of bytes that starts at a page, as direct transfers want it."""
    copy = plain_memory(part.numel())
    return copy.copy_(part)
