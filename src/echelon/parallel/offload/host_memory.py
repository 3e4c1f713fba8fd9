# SPDX-License-Identifier: Apache-2.0
"""Memory of the host in bounded buffers, and copies between it and a device.

Memory is whole pages, locked where a GPU copies them. Copies have one stream for each direction;
their order is said in *marks*: points in the work of a stream or of the computation. On a CPU there
is no work next to the computation, and a copy is done when it is asked for.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch

from echelon.core.disk import PAGE_BYTES, round_up_to_pages
from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.zero import OFFLOAD_HOST_MEMORY
from echelon.core.units import binary_bytes

Owner = TypeVar("Owner")

Allocate = Callable[[int], torch.Tensor]
"""Return that many bytes of zeros, as a tensor of bytes that starts at a page."""


class _Pages(mmap.mmap):
    """Private pages; a forked child does not get them, or a page under way would be copied."""

    def __new__(cls, size: int) -> _Pages:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return super().__new__(cls, -1, size, flags=flags)

    def __init__(self, size: int) -> None:
        if hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)


class _LockedPages(_Pages):
    """Pages that the CUDA driver knows, so that it copies them without a copy of its own.

    torch's own pinned allocator rounds up to a power of two, which for slices that fill most of a
    machine is most of another machine.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        self._driver: Any = torch.cuda.cudart()
        code = int(self._driver.cudaHostRegister(self._address, size, 0))
        if code:
            self._address = 0
            raise OSError(f"cudaHostRegister returned {code}")

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            self._driver.cudaHostUnregister(self._address)


def device_memory(device: torch.device) -> Allocate:
    """Return what allocates zeros on a device."""
    return partial(torch.zeros, dtype=torch.uint8, device=device)


def plain_memory(size: int) -> torch.Tensor:
    """Return `size` bytes of zeros that start at a page."""
    return _allocate(_Pages, size, "allocating")


def locked_memory(size: int) -> torch.Tensor:
    """Return `size` bytes of zeros that start at a page and that a GPU can copy by itself."""
    return _allocate(_LockedPages, size, "allocating and locking")


def _allocate(pages: type[_Pages], size: int, doing: str) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        held = pages(round_up_to_pages(size))
    except (OSError, MemoryError) as error:
        raise EnvironmentProblem(
            OFFLOAD_HOST_MEMORY.problem(
                f"{doing} {binary_bytes(size)} in the memory of the host failed: {error}"
            )
        ) from error
    return torch.frombuffer(held, dtype=torch.uint8, count=size)


def storage_key(tensor: torch.Tensor) -> int:
    """The key of the storage of a tensor among all that are alive, with or without memory."""
    return tensor.untyped_storage()._cdata


class BoundedBuffers(Generic[Owner]):
    """Lend at most `count` buffers at once, each as large as the largest set so far."""

    def __init__(self, count: int, allocate: Allocate) -> None:
        assert count > 0, "a set needs a buffer"
        self._count, self._allocate = count, allocate
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}
        self.owners: dict[int, Owner] = {}
        self._largest = PAGE_BYTES

    def take(self, size: int, owner: Owner) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes, or None while all are taken."""
        self._largest = max(self._largest, size)
        if len(self._taken) >= self._count:
            return None
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes < self._largest:
            # One that is too small for some set is so for good: sets come round again every step.
            buffer = self._allocate(self._largest)
        key = storage_key(buffer)
        self._taken[key], self.owners[key] = buffer, owner
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        del self.owners[storage_key(buffer)]
        self._free.append(self._taken.pop(storage_key(buffer)))

    def owner_of(self, tensors: Sequence[torch.Tensor]) -> Owner | None:
        """Return whose buffer tensors are in; None for those that are in none."""
        owners = {self.owners.get(storage_key(tensor)) for tensor in tensors}
        assert len(owners) == 1, "tensors of several fetches are put at once"
        return owners.pop()

    def clear(self) -> None:
        """Forget all buffers; those that are taken live as long as whoever has them."""
        for held in (self._free, self._taken, self.owners):
            held.clear()

    def num_bytes(self) -> int:
        """Return the bytes of the storages of all buffers."""
        return sum(
            buffer.untyped_storage().nbytes() for buffer in (*self._free, *self._taken.values())
        )


CopyDirection = Literal["up", "down"]
"""up: from the host to the device; down: from the device to the host."""

TensorCopy = tuple[torch.Tensor, torch.Tensor]
"""A target and a source."""


class CompletedEvent:
    """The mark of what is done already."""

    def synchronize(self) -> None:
        """Return when the device has come past it: at once."""


StreamEvent = torch.cuda.Event | torch.Event | CompletedEvent
"""A point in the work of the device."""


class CopyStreams:
    """What copies between host and device; this one copies at once, as a CPU does."""

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Copy once the marks are passed; return the mark of the end."""
        for target, source in copies:
            target.copy_(source)
        return CompletedEvent()

    def record_event(self) -> StreamEvent:
        """Return the mark of what the computation has been given to do so far."""
        return CompletedEvent()

    def wait_for(self, mark: StreamEvent) -> None:
        """Let what the computation is given from now on wait for a mark."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a device tensor from others until both directions are done with it."""


class CudaCopyStreams(CopyStreams):
    """Copy on two CUDA streams; the computation is on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {direction: torch.cuda.Stream(device) for direction in ("up", "down")}

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Start to copy; the memory on the host must be locked, or this waits."""
        stream = self._streams[direction]
        for mark in after:
            assert not isinstance(mark, CompletedEvent), "a mark of other streams"
            stream.wait_event(mark)
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def record_event(self) -> StreamEvent:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, mark: StreamEvent) -> None:
        """Let the current stream wait for an event."""
        assert not isinstance(mark, CompletedEvent), "a mark of other streams"
        torch.cuda.current_stream(self.device).wait_event(mark)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that both streams use a tensor."""
        for stream in self._streams.values():
            tensor.record_stream(stream)


def make_copy_streams(device: torch.device) -> CopyStreams:
    """Return the streams between the host and `device`."""
    return CudaCopyStreams(device) if device.type == "cuda" else CopyStreams()
