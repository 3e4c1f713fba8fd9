"""Slices that rest on the host side and are computed on by a device: copied there and back.

A set is read to the host, copied up, changed by the device, copied down and written. Copies run
beside the computation and the host does not wait for them; buffers on the device are as few as
those of the files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from echelon.core.offload_file import whole_pages
from echelon.parallel.offload.buffers import Buffers
from echelon.parallel.offload.lanes import Lanes, Mark
from echelon.parallel.offload.rest import Fetched, Pool, Rest, check_fits


class HostSide(Rest, Protocol):
    """A place whose tensors are in the memory of the host when they are fetched."""

    def put_after(
        self,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        complete: Callable[[], object],
    ) -> None:
        """Put tensors whose content is there when `complete` returns."""
        ...


class CopiedSet:
    """What one fetch named: on the host, on its way up, or with the caller."""

    __slots__ = ("_keeper", "buffer", "copied", "done", "keys", "on_host", "read", "tensors")

    def __init__(
        self, keeper: CopiedRest, keys: Sequence[str], on_host: Fetched, *, read: bool
    ) -> None:
        """Hold what has been asked of the host side."""
        self._keeper, self.keys, self.on_host, self.read = keeper, keys, on_host, read
        self.buffer: torch.Tensor | None = None
        self.copied: Mark | None = None
        self.tensors: list[torch.Tensor] = []
        self.done = False

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the device; the computation waits for their content."""
        return self._keeper.wait_for(self)

    def arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.copied is not None

    def release(self) -> None:
        """Give the buffers back, without copying down."""
        self._keeper.release(self)


class CopiedRest:
    """Rest on a host side; fetch to a device."""

    def __init__(
        self, side: HostSide, device: torch.device, lanes: Lanes, *, num_buffers: int
    ) -> None:
        """Bring what rests on `side` to at most `num_buffers` buffers of `device`."""
        self.pool: Pool = side.pool
        self._side, self._device, self._lanes = side, device, lanes
        self._buffers = Buffers(num_buffers, self._allocate)
        self._ahead: deque[CopiedSet] = deque()
        self._out: dict[int, CopiedSet] = {}
        self._free_after: dict[int, Mark] = {}
        self._written: dict[str, Mark] = {}
        self._kinds: dict[str, tuple[int, torch.dtype]] = {}

    def add(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Reserve zeros for a new key on the host side."""
        self._side.add(key, numel, dtype)
        self._kinds[key] = (numel, dtype)

    def view(self, key: str) -> torch.Tensor:
        """Return the content of a key in the memory of the host."""
        if key in self._written:
            self._written[key].synchronize()
        return self._side.view(key)

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> CopiedSet:
        """Start to bring keys to the device."""
        found = CopiedSet(self, list(keys), self._side.fetch(keys, read=read), read=read)
        self._ahead.append(found)
        self._start_what_arrived()
        return found

    def put(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Start to bring tensors back from the device."""
        found = self._owner(tensors)
        if found is None:
            found = self.fetch(keys, read=False)
            for key, room, tensor in zip(keys, found.wait(), tensors, strict=True):
                check_fits(key, room, tensor)
                room.copy_(tensor)
            tensors = found.tensors
        rooms = dict(zip(found.keys, found.on_host.wait(), strict=True))
        targets = [rooms[key] for key in keys]
        for key, room, tensor in zip(keys, targets, tensors, strict=True):
            check_fits(key, room, tensor)
        copies = list(zip(targets, tensors, strict=True))
        mark = self._lanes.copy("down", copies, [self._lanes.mark()])
        self._written.update(dict.fromkeys(keys, mark))
        self._free(found, mark)
        self._side.put_after(keys, targets, mark.synchronize)
        self._start_what_arrived()

    def flush(self) -> None:
        """Return when everything that was put is there."""
        for mark in self._written.values():
            mark.synchronize()
        self._side.flush()

    def close(self) -> None:
        """Free buffers and the host side."""
        for mark in (*self._written.values(), *self._free_after.values()):
            mark.synchronize()
        self._buffers.clear()
        self._ahead.clear()
        self._out.clear()
        self._side.close()

    def held_bytes(self) -> int:
        """Return the bytes that rest on the host side."""
        return self._side.held_bytes()

    def live_bytes(self) -> Mapping[Pool, int]:
        """Return what the host side takes, and the buffers on the device."""
        return {**self._side.live_bytes(), "device": self._buffers.num_bytes()}

    def wait_for(self, found: CopiedSet) -> list[torch.Tensor]:
        """Return the tensors of a set; what is computed from now on waits for their content."""
        while found.copied is None:
            # Those that were asked for before come first, or they would wait for each other.
            self._ahead[0].on_host.wait()
            started = self._start_first()
            assert started, f"{found.keys} wait for a buffer, and the caller has all of them"
        assert not found.done, f"{found.keys} were put or released"
        self._lanes.hold(found.copied)
        return found.tensors

    def release(self, found: CopiedSet) -> None:
        """Use the buffers of a set for others once the computation is done with it."""
        if found.done:
            return
        if found.copied is None:
            found.done = True
            self._ahead.remove(found)
        else:
            # A thread may read the next set into this memory of the host as soon as it is free.
            found.copied.synchronize()
            self._free(found, self._lanes.mark())
        found.on_host.release()
        self._start_what_arrived()

    def _allocate(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._lanes.share(buffer)
        # New memory may still be read by what was computed in it before.
        self._free_after[buffer.data_ptr()] = self._lanes.mark()
        return buffer

    def _start_what_arrived(self) -> None:
        while self._ahead and self._ahead[0].on_host.arrived() and self._start_first():
            pass

    def _start_first(self) -> bool:
        """Copy the first set that waits up to the device; False while all buffers are taken."""
        found = self._ahead[0]
        kinds = [self._kinds[key] for key in found.keys]
        sizes = [numel * dtype.itemsize for numel, dtype in kinds]
        buffer = self._buffers.take(sum(map(whole_pages, sizes)))
        if buffer is None:
            return False
        self._ahead.popleft()
        start = 0
        for (_, dtype), size in zip(kinds, sizes, strict=True):
            found.tensors.append(buffer[start : start + size].view(dtype))
            start += whole_pages(size)
        copies = list(zip(found.tensors, found.on_host.wait(), strict=True)) if found.read else []
        after = [self._written[key] for key in found.keys if key in self._written]
        after.append(self._free_after[buffer.data_ptr()])
        found.buffer, found.copied = buffer, self._lanes.copy("up", copies, after)
        self._out[buffer.data_ptr()] = found
        return True

    def _free(self, found: CopiedSet, mark: Mark) -> None:
        assert found.buffer is not None, "a set without a buffer is not freed"
        found.done = True
        address = found.buffer.data_ptr()
        del self._out[address]
        self._free_after[address] = mark
        self._buffers.give_back(found.buffer)
        found.buffer = None

    def _owner(self, tensors: Sequence[torch.Tensor]) -> CopiedSet | None:
        """Return the set that these tensors are of; None for tensors that are not ours."""
        found = {self._out.get(tensor.untyped_storage().data_ptr()) for tensor in tensors}
        assert len(found) == 1, "tensors of several fetches are put at once"
        return found.pop()
