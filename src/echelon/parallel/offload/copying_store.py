# SPDX-License-Identifier: Apache-2.0
"""Slices that rest on the host side and are computed on by a device: copied there and back.

A set is read to the host, copied up, changed by the device, copied down and written. Copies run
beside the computation and the host does not wait for them; buffers on the device are as few as
those of the files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from echelon.core.disk import round_up_to_pages
from echelon.parallel.offload.file_store import FileFetch, FileOffloadStore
from echelon.parallel.offload.host_memory import (
    BoundedBuffers,
    CopyStreams,
    StreamEvent,
    TensorCopy,
    storage_key,
)
from echelon.parallel.offload.store import (
    ImmediateFetch,
    MemoryOffloadStore,
    Pool,
    check_fits,
    copy_into,
)

HostSideStore = MemoryOffloadStore | FileOffloadStore
"""A place whose tensors are in the memory of the host when they are fetched."""


class CopiedFetch:
    """What one fetch named: on the host, on its way up, or with the caller."""

    __slots__ = ("_store", "buffer", "copied", "done", "keys", "on_host", "read", "tensors")

    def __init__(
        self,
        store: CopyingOffloadStore,
        keys: Sequence[str],
        on_host: ImmediateFetch | FileFetch,
        *,
        read: bool,
    ) -> None:
        self._store, self.keys, self.on_host, self.read = store, keys, on_host, read
        self.buffer: torch.Tensor | None = None
        self.copied: StreamEvent | None = None
        self.tensors: list[torch.Tensor] = []
        self.done = False

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the device; the computation waits for their content."""
        return self._store.wait_for(self)

    def arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.copied is not None

    def release(self) -> None:
        """Give the buffers back, without copying down."""
        self._store.release(self)


class CopyingOffloadStore:
    """Rest on a host side; fetch to a device."""

    def __init__(
        self, side: HostSideStore, device: torch.device, streams: CopyStreams, *, num_buffers: int
    ) -> None:
        """Bring what rests on `side` to at most `num_buffers` buffers of `device`."""
        self.pool: Pool = side.pool
        self._host, self._device, self._streams = side, device, streams
        self._buffers = BoundedBuffers[CopiedFetch](num_buffers, self._allocate)
        self._ahead: deque[CopiedFetch] = deque()
        self._free_after: dict[int, StreamEvent] = {}
        self._written: dict[str, StreamEvent] = {}
        self._kinds: dict[str, tuple[int, torch.dtype]] = {}

    def add(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Reserve zeros for a new key on the host side."""
        self._host.add(key, numel, dtype)
        self._kinds[key] = (numel, dtype)

    def view(self, key: str) -> torch.Tensor:
        """Return the content of a key in the memory of the host."""
        if key in self._written:
            self._written[key].synchronize()
        return self._host.view(key)

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> CopiedFetch:
        """Start to bring keys to the device."""
        fetched = CopiedFetch(self, list(keys), self._host.fetch(keys, read=read), read=read)
        self._ahead.append(fetched)
        self._start_what_arrived()
        return fetched

    def put(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Start to bring tensors back from the device."""
        fetched = self._buffers.owner_of(tensors)
        if fetched is None:
            fetched = self.fetch(keys, read=False)
            copy_into(keys, fetched.wait(), tensors)
            tensors = fetched.tensors
        rooms = dict(zip(fetched.keys, fetched.on_host.wait(), strict=True))
        targets = [rooms[key] for key in keys]
        for key, room, tensor in zip(keys, targets, tensors, strict=True):
            check_fits(key, room, tensor)
        copies = list(zip(targets, tensors, strict=True))
        mark = self._streams.copy("down", copies, [self._streams.record_event()])
        self._written.update(dict.fromkeys(keys, mark))
        self._free(fetched, mark)
        self._host.put(keys, targets, mark.synchronize)
        self._start_what_arrived()

    def flush(self) -> None:
        """Return when everything that was put is there."""
        for mark in self._written.values():
            mark.synchronize()
        self._host.flush()

    def close(self) -> None:
        """Free buffers and the host side."""
        for mark in (*self._written.values(), *self._free_after.values()):
            mark.synchronize()
        self._buffers.clear()
        self._ahead.clear()
        self._host.close()

    def held_bytes(self) -> int:
        """Return the bytes that rest on the host side."""
        return self._host.held_bytes()

    def live_bytes(self) -> Mapping[Pool, int]:
        """Return what the host side takes, and the buffers on the device."""
        return {**self._host.live_bytes(), "device": self._buffers.num_bytes()}

    def wait_for(self, fetched: CopiedFetch) -> list[torch.Tensor]:
        """Return the tensors of a set; what is computed from now on waits for their content."""
        while fetched.copied is None:
            # Those that were asked for before come first, or they would wait for each other.
            self._ahead[0].on_host.wait()
            started = self._start_first()
            assert started, f"{fetched.keys} wait for a buffer, and the caller has all of them"
        assert not fetched.done, f"{fetched.keys} were put or released"
        self._streams.wait_for(fetched.copied)
        return fetched.tensors

    def release(self, fetched: CopiedFetch) -> None:
        """Use the buffers of a set for others once the computation is done with it."""
        if fetched.done:
            return
        if fetched.copied is None:
            fetched.done = True
            self._ahead.remove(fetched)
        else:
            # A thread may read the next set into this memory of the host as soon as it is free.
            fetched.copied.synchronize()
            self._free(fetched, self._streams.record_event())
        fetched.on_host.release()
        self._start_what_arrived()

    def _allocate(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._streams.record_use(buffer)
        # New memory may still be read by what was computed in it before.
        self._free_after[storage_key(buffer)] = self._streams.record_event()
        return buffer

    def _start_what_arrived(self) -> None:
        while self._ahead and self._ahead[0].on_host.arrived() and self._start_first():
            pass

    def _start_first(self) -> bool:
        """Copy the first set that waits up to the device; False while all buffers are taken."""
        fetched = self._ahead[0]
        kinds = [self._kinds[key] for key in fetched.keys]
        sizes = [numel * dtype.itemsize for numel, dtype in kinds]
        buffer = self._buffers.take(sum(map(round_up_to_pages, sizes)), fetched)
        if buffer is None:
            return False
        self._ahead.popleft()
        start = 0
        for (_, dtype), size in zip(kinds, sizes, strict=True):
            fetched.tensors.append(buffer[start : start + size].view(dtype))
            start += round_up_to_pages(size)
        copies: list[TensorCopy] = []
        if fetched.read:
            copies += zip(fetched.tensors, fetched.on_host.wait(), strict=True)
        after = [self._written[key] for key in fetched.keys if key in self._written]
        after.append(self._free_after[storage_key(buffer)])
        fetched.buffer, fetched.copied = buffer, self._streams.copy("up", copies, after)
        return True

    def _free(self, fetched: CopiedFetch, mark: StreamEvent) -> None:
        assert fetched.buffer is not None, "a set without a buffer is not freed"
        fetched.done = True
        self._free_after[storage_key(fetched.buffer)] = mark
        self._buffers.give_back(fetched.buffer)
        fetched.buffer = None
