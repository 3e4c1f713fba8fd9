# SPDX-License-Identifier: Apache-2.0
"""Slices in a file: read ahead and written behind by a few threads, through bounded buffers.

One file per rank, each key at whole pages of its own, so the threads move bytes between the disk
and the memory that the caller computes in, with no copy between. A *set* (what one fetch names)
takes one of `num_buffers` buffers from its first byte read to its last byte written. Sets get
buffers in the order in which they were fetched.

What goes wrong in a thread is kept, and raised by every later call.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Literal

import torch

from echelon.core.disk import (
    explain_offload_error,
    is_direct,
    open_offload_file,
    read_all,
    reserve,
    round_up_to_pages,
    write_all,
)
from echelon.core.errors import EchelonError, EnvironmentProblem
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.units import binary_bytes
from echelon.parallel.offload.host_memory import Allocate, BoundedBuffers, plain_memory
from echelon.parallel.offload.store import Pool, copy_into

_THREADS = 4
"""Transfers under way at once: what keeps one NVMe disk busy."""

FetchPhase = Literal["queued", "reading", "ready", "writing", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTransfer:
    """Say what one thread moves at a time: memory, and where it lies in the file."""

    key: str
    memory: memoryview
    start: int
    after: FileFetch | None


class FileOffloadStore:
    """Rest in a nameless file of a folder."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_buffers: int,
        *,
        chunk_bytes: int = TRAINING_PIECES.file_bytes,
        allocate: Allocate = plain_memory,
    ) -> None:
        """Make the file; EnvironmentProblem where the folder is missing or not writable.

        The largest transfer has `chunk_bytes`, whole pages.
        """
        self._chunk_bytes = chunk_bytes
        self.pool: Pool = "nvme"
        self._folder, self._who = folder, f"rank {rank}"
        self._file = open_offload_file(folder, self._who)
        self._extents: dict[str, FileExtent] = {}
        self._end = 0
        self._buffers = BoundedBuffers[FileFetch](num_buffers, allocate)
        self._changed = Condition()
        self._queue: deque[FileFetch] = deque()
        self._writing: dict[str, FileFetch] = {}
        self._failure: Exception | None = None
        self._open = True
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="offload")

    def add(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Reserve the space of a new key, as zeros."""
        assert key not in self._extents, f"{key} rests here already"
        place = FileExtent(key=key, start=self._end, numel=numel, dtype=dtype)
        size = binary_bytes(self._end + place.span_bytes)
        with self._explained(f"reserving {size} up to {key}"):
            reserve(self._file, place.start, place.span_bytes)
        self._extents[key] = place
        self._end += place.span_bytes

    def view(self, key: str) -> torch.Tensor:
        """Return the content of a key, mapped from the file."""
        place = self._extents[key]
        with self._changed:
            self._changed.wait_for(lambda: key not in self._writing or self._failure is not None)
            self._check()
        if place.numel == 0:
            return torch.empty(0, dtype=place.dtype)
        with self._explained(f"mapping {key}"):
            # Reading a page that is not there would end the process with a bus error.
            self._require_all_there()
            mapped = mmap.mmap(self._file, place.span_bytes, offset=place.start)
        return torch.frombuffer(mapped, dtype=place.dtype, count=place.numel)

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> FileFetch:
        """Start to read keys into one buffer, once there is one."""
        with self._changed:
            self._check()
            places = [self._extents[key] for key in keys]
            fetched = FileFetch(places, read=read, wait_for=self.wait_for, release=self.release)
            self._queue.append(fetched)
            self._grant()
            return fetched

    def put(
        self,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        complete: Callable[[], object] = lambda: None,
    ) -> None:
        """Start to write tensors; copies those of no fetch first, waiting for a buffer."""
        with self._changed:
            self._check()
            fetched = self._buffers.owner_of(tensors)
        if fetched is None:
            complete()
            fetched = self.fetch(keys, read=False)
            copy_into(keys, fetched.wait(), tensors)
            tensors = fetched.tensors()
        with self._changed:
            parts = fetched.parts_of(keys, tensors)
            fetched.phase = "writing"
            self._start(fetched, parts, lambda t: self._write(t, complete))
            if fetched.left:
                self._writing.update(dict.fromkeys(keys, fetched))

    def flush(self) -> None:
        """Return when all that was put is on the disk."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing or self._failure is not None)
            self._check()
        if not is_direct(self._file):
            with self._explained("writing"):
                os.fsync(self._file)

    def close(self) -> None:
        """End the threads and free buffers and file; what is under way is given up."""
        with self._changed:
            if not self._open:
                return
            self._open = False
            self._queue.clear()
            self._changed.notify_all()
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)
        self._buffers.clear()
        self._writing.clear()
        self._extents.clear()

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that rest here."""
        return sum(place.num_bytes for place in self._extents.values())

    def live_bytes(self) -> Mapping[Pool, int]:
        """Return the storages of the buffers, and the size of the file (whole pages)."""
        file = os.fstat(self._file).st_size if self._extents else 0
        return {"host": self._buffers.num_bytes(), "nvme": file}

    def wait_for(self, fetched: FileFetch) -> list[torch.Tensor]:
        """Return the tensors of a set once they have been read."""
        with self._changed:
            while not fetched.arrived():
                self._check()
                assert fetched.phase == "reading" or self._frees_a_buffer(), (
                    f"{fetched} waits for a buffer, and the caller has all of them"
                )
                self._changed.wait()
            self._check()
            assert fetched.phase == "ready", f"{fetched} was put or released"
            return fetched.tensors()

    def release(self, fetched: FileFetch) -> None:
        """Use the buffer of a set for others once nothing is read into it any more."""
        with self._changed:
            if fetched.phase == "queued":
                self._queue.remove(fetched)
                fetched.phase = "done"
            elif fetched.phase == "reading":
                fetched.dropped = True
            elif fetched.phase == "ready":
                self._free(fetched)

    def _grant(self) -> None:
        """Give buffers to sets that wait for one, first come first served."""
        while self._queue and self._open:
            fetched = self._queue[0]
            fetched.buffer = self._buffers.take(fetched.size, fetched)
            if fetched.buffer is None:
                return
            self._queue.popleft()
            fetched.phase = "reading"
            self._start(fetched, fetched.parts() if fetched.read else (), self._read)

    def _start(
        self,
        fetched: FileFetch,
        parts: Iterable[tuple[FileExtent, torch.Tensor]],
        move: Callable[[FileTransfer], None],
    ) -> None:
        transfers = [
            transfer for place, part in parts for transfer in self._transfers_of(place, part)
        ]
        fetched.left = len(transfers)
        for transfer in transfers:
            self._threads.submit(self._run, fetched, transfer, move)
        if not transfers:
            self._moved(fetched)

    def _transfers_of(self, place: FileExtent, part: torch.Tensor) -> Iterator[FileTransfer]:
        memory = part.numpy().data
        # Threads take transfers in order, so a write that one waits for has been taken before.
        after = self._writing.get(place.key)
        for start in range(0, place.span_bytes, self._chunk_bytes):
            yield FileTransfer(
                key=place.key,
                memory=memory[start : start + self._chunk_bytes],
                start=place.start + start,
                after=after,
            )

    def _run(
        self, fetched: FileFetch, transfer: FileTransfer, move: Callable[[FileTransfer], None]
    ) -> None:
        """Move one piece, in a thread; whatever goes wrong is kept for the caller."""
        failure = None
        try:
            if self._may_move(transfer):
                move(transfer)
        except Exception as error:
            failure = error
        with self._changed:
            self._failure = self._failure or failure
            fetched.left -= 1
            if fetched.left == 0:
                self._moved(fetched)
            self._changed.notify_all()

    def _may_move(self, transfer: FileTransfer) -> bool:
        """Return once an earlier write of the same key is done: False if all has ended."""
        after = transfer.after
        with self._changed:
            self._changed.wait_for(
                lambda: after is None or after.left == 0 or self._failure or not self._open
            )
            return self._failure is None and self._open

    def _read(self, transfer: FileTransfer) -> None:
        with self._explained(f"reading {transfer.key}"):
            read_all(self._file, transfer.memory, transfer.start)

    def _write(self, transfer: FileTransfer, complete: Callable[[], object]) -> None:
        complete()
        with self._explained(f"writing {transfer.key}"):
            # Writing past the end of a file that was cut short would leave zeros before it.
            self._require_all_there()
            write_all(self._file, transfer.memory, transfer.start)

    def _require_all_there(self) -> None:
        size = os.fstat(self._file).st_size
        if size < self._end:
            raise OSError(errno.EIO, f"the file ends at byte {size}")

    def _moved(self, fetched: FileFetch) -> None:
        """Go on with a set whose last byte has arrived, here or in the file."""
        if fetched.phase == "reading" and not fetched.dropped:
            fetched.phase = "ready"
            return
        for place in fetched.extents:
            if self._writing.get(place.key) is fetched:
                del self._writing[place.key]
        self._free(fetched)

    def _free(self, fetched: FileFetch) -> None:
        assert fetched.buffer is not None, "a set without a buffer is not freed"
        fetched.phase = "done"
        self._buffers.give_back(fetched.buffer)
        fetched.buffer = None
        try:
            self._grant()
        except EchelonError as error:
            self._failure = self._failure or error

    def _frees_a_buffer(self) -> bool:
        owners = self._buffers.owners.values()
        return any(fetched.phase == "writing" or fetched.dropped for fetched in owners)

    def _check(self) -> None:
        """Raise what went wrong in a thread."""
        assert self._open, "a place that was closed is used"
        if isinstance(self._failure, EnvironmentProblem):
            raise EnvironmentProblem(self._failure.problems) from self._failure
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explain_offload_error(error, self._folder, f"{self._who}: {doing}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FileExtent:
    """Say where a key rests in the file: at `start`, in whole pages."""

    key: str
    start: int
    numel: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """Return the bytes in the file, and in a buffer."""
        return round_up_to_pages(self.num_bytes)


class FileFetch:
    """What one fetch named: on its way, with the caller, or on its way back."""

    __slots__ = ("_release", "_wait", "buffer", "dropped", "extents", "left", "phase", "read")

    def __init__(
        self,
        places: Sequence[FileExtent],
        *,
        read: bool,
        wait_for: Callable[[FileFetch], list[torch.Tensor]],
        release: Callable[[FileFetch], None],
    ) -> None:
        """Queue for a buffer; `read` says whether the content is wanted.

        Whoever gives it one can `wait_for` its tensors, and takes a buffer back by `release`.
        """
        self._wait, self._release = wait_for, release
        self.extents, self.read = places, read
        self.phase: FetchPhase = "queued"
        self.buffer: torch.Tensor | None = None
        self.left, self.dropped = 0, False

    def __repr__(self) -> str:
        """Name the keys."""
        return f"the set of {', '.join(place.key for place in self.extents)}"

    @property
    def size(self) -> int:
        """Return the bytes of buffer that the set needs."""
        return sum(place.span_bytes for place in self.extents)

    def parts(self) -> Iterator[tuple[FileExtent, torch.Tensor]]:
        """Yield each place with its part of the buffer, in bytes and whole pages."""
        assert self.buffer is not None, "the set has no buffer"
        start = 0
        for place in self.extents:
            yield place, self.buffer[start : start + place.span_bytes]
            start += place.span_bytes

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the buffer, in the order of the keys."""
        return [part[: place.num_bytes].view(place.dtype) for place, part in self.parts()]

    def parts_of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> list[tuple[FileExtent, torch.Tensor]]:
        """Return the parts that keep `tensors`, which must be those of the set itself."""
        assert self.phase == "ready", f"{self} is not the caller's any more"
        parts = {place.key: (place, part) for place, part in self.parts()}
        for key, tensor in zip(keys, tensors, strict=True):
            place, part = parts[key]
            assert tensor.data_ptr() == part.data_ptr(), f"{key} is put from another key's place"
            assert tensor.dtype == place.dtype, f"{key} is put as {tensor.dtype}"
            assert tensor.shape == (place.numel,), f"{key} is put as {list(tensor.shape)}"
        return [parts[key] for key in keys]

    def arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.phase not in ("queued", "reading")

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors once they are there."""
        return self._wait(self)

    def release(self) -> None:
        """Give the buffer back, without writing."""
        self._release(self)
