# SPDX-License-Identifier: Apache-2.0
"""Slices that rest on the host or in files, as shapes: only their buffers are on the device.

The device's side of `parallel/offload/store.py`: as many buffers as there, each as large as
the largest set, taken when a set is brought up and free again when it was put or released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from echelon.core.disk import round_up_to_pages
from echelon.parallel.offload.host_memory import (
    CompletedEvent,
    CopyDirection,
    CopyStreams,
    StreamEvent,
    TensorCopy,
)
from echelon.parallel.offload.store import ImmediateFetch, MemoryOffloadStore
from echelon.rehearsal.memory import BUFFERS, HOST, MemoryMeter


class RehearsedFetch(ImmediateFetch):
    """A set of shapes that is brought to the device when a buffer is free."""

    __slots__ = ("_store", "buffer", "keys")

    def __init__(self, store: RehearsedOffloadStore, keys: Sequence[str]) -> None:
        """Ask for `keys`."""
        super().__init__([])
        self._store, self.keys = store, list(keys)
        self.buffer: torch.Tensor | None = None

    def wait(self) -> list[torch.Tensor]:
        """Return the set on the device."""
        if self.buffer is None:
            self._store.bring(self)
        return self._tensors

    def arrived(self) -> bool:
        """Return whether the set has a buffer."""
        return self.buffer is not None

    def release(self) -> None:
        """Give the buffer back."""
        self._store.leave(self)

    def hold(self, buffer: torch.Tensor, kinds: Iterable[tuple[int, torch.dtype]]) -> None:
        """Take a buffer for tensors of so many elements."""
        self.buffer, start = buffer, 0
        for numel, dtype in kinds:
            size = numel * dtype.itemsize
            self._tensors.append(buffer[start : start + size].view(dtype))
            start += round_up_to_pages(size)


class RehearsedOffloadStore(MemoryOffloadStore):
    """Rest off the device; bring sets to at most `num_buffers` buffers of it."""

    def __init__(self, device: torch.device, meter: MemoryMeter, *, num_buffers: int) -> None:
        """Begin with nothing."""
        super().__init__("host", self._room)
        self._device, self._meter, self._count = device, meter, num_buffers
        self._free: list[torch.Tensor] = []
        self._fetched: list[RehearsedFetch] = []
        self._largest = 0

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> RehearsedFetch:
        """Start to bring keys to the device, where a buffer is free."""
        del read
        found = RehearsedFetch(self, keys)
        self._fetched.append(found)
        if sum(one.arrived() for one in self._fetched) < self._count:
            self.bring(found)
        return found

    def put(
        self,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        complete: Callable[[], object] | None = None,
    ) -> None:
        """Take tensors back; those of a fetched set give its buffer back."""
        del keys, complete
        memory = tensors[0].untyped_storage()._cdata
        for one in self._fetched:
            if one.buffer is not None and one.buffer.untyped_storage()._cdata == memory:
                self.leave(one)
                return

    def bring(self, found: RehearsedFetch) -> None:
        """Give a set its buffer."""
        taken = sum(one.arrived() for one in self._fetched)
        assert taken < self._count, f"{found.keys} wait for a buffer, and all are taken"
        kinds = [(self._tensors[key].numel(), self._tensors[key].dtype) for key in found.keys]
        size = sum(round_up_to_pages(numel * dtype.itemsize) for numel, dtype in kinds)
        self._largest = max(self._largest, size)
        found.hold(self._grown(self._free.pop() if self._free else None), kinds)

    def leave(self, found: RehearsedFetch) -> None:
        """Take the buffer of a set; twice is fine."""
        if found in self._fetched:
            self._fetched.remove(found)
            if found.buffer is not None:
                self._free.append(self._grown(found.buffer))

    def _grown(self, buffer: torch.Tensor | None) -> torch.Tensor:
        """Return a buffer that takes the largest set: in later steps all of them do."""
        if buffer is not None and buffer.nbytes >= self._largest:
            return buffer
        with self._meter.within(BUFFERS):
            return torch.empty(self._largest, dtype=torch.uint8, device=self._device)

    def _room(self, num_bytes: int) -> torch.Tensor:
        with self._meter.within(HOST):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class RehearsedCopyStreams(CopyStreams):
    """Copies between host and device that move nothing: one side has no elements."""

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Return the mark of the end."""
        return CompletedEvent()
