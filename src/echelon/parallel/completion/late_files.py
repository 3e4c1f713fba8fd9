# SPDX-License-Identifier: Apache-2.0
"""Slices in a file, of which nothing is there before it is awaited and nothing is free before it
is written.

Threads read into private memory and write from private memory. A write begins when the caller next
asks for something, so whoever touches a buffer in between does so while it is in flight; the pieces
of one move go in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event

import torch

from echelon.models.piece_sizes import TRAINING_PIECES
from echelon.parallel.completion.in_flight import InFlight, LateOperation, OperationName
from echelon.parallel.completion.late_memory import LateBuffers
from echelon.parallel.completion.memory import poison
from echelon.parallel.offload.buffers import plain_memory
from echelon.parallel.offload.file_store import (
    FileExtent,
    FileFetch,
    FileOffloadStore,
    FileTransfer,
)


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
        """Return the content of a key, mapped from the file."""
        self._let_go()
        return super().view(key)

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> FileFetch:
        """Start to read keys into one buffer, once there is one."""
        self._let_go()
        return super().fetch(keys, read=read)

    def flush(self) -> None:
        """Return when all that was put is on the disk."""
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
