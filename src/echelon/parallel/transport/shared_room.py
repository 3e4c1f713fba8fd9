# SPDX-License-Identifier: Apache-2.0
"""Small sums between ranks of one host, through memory that all of them map.

A message over Gloo wakes four threads, which takes a millisecond where processors sleep between
messages: as long as a layer takes to write one token. Here each member writes its part into a slot
of its own and then the number of the operation beside it, and looks at the numbers of the others
until they are there. All add the slots up in the order of members, so all have the same bits.

    numbers    64 bytes for each member: the last operation whose part it has written
    slots      two of `slot_bytes` for each member, for operations of even and of odd numbers

A slot is written again two operations later. Who begins operation k + 1 has seen the number k of
everyone, and who has written number k had read all slots of k - 1: so nothing is overwritten that
somebody still reads. The order of two stores is kept by x86 processors; on others there is no room.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether other processors see stores in the order in which they were made."""

_LINE = 64  # bytes that a processor fetches at once: numbers of two members never share one
_SPINS = 4_000
"""Looks before a processor is offered to others: about a quarter of a millisecond."""
_YIELDS = 2_000
"""Offers before the thread sleeps between looks."""
_SLEEP_S = 0.0005
_HOME = Path("/dev/shm")


class SharedWork:
    """An exchange whose own part is written; `wait` returns when the parts of all are read."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def is_completed(self) -> bool:
        """Return whether the result is there."""
        return self._end is None

    def wait(self) -> None:
        """Return when the result is there."""
        end, self._end = self._end, None
        if end is not None:
            end()


class SharedRoom:
    """The memory that the members of a group share, as one of them sees it."""

    def __init__(self, memory: mmap.mmap, size: int, index: int, slot_bytes: int) -> None:
        """Map the memory of a group of `size` members, of which this is `index`."""
        self._size, self._index, self._number = size, index, 0
        self._slot_bytes = slot_bytes
        self._numbers = memoryview(memory)[: size * _LINE].cast("Q")
        self._slots = [
            torch.frombuffer(memory, dtype=torch.uint8, count=slot_bytes, offset=start)
            for start in range(size * _LINE, size * (_LINE + 2 * slot_bytes), slot_bytes)
        ]
        self._under_way: SharedWork | None = None

    def has_room(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor fits into a slot."""
        return tensor.nbytes <= self._slot_bytes and tensor.device.type == "cpu"

    def add(self, tensor: torch.Tensor) -> SharedWork:
        """Sum `tensor` over the members, in place, in their order."""

        def end(parts: list[torch.Tensor]) -> None:
            tensor.copy_(parts[0])
            for one in parts[1:]:
                tensor.add_(one)

        return self._exchange(tensor, end)

    def gather(self, whole: torch.Tensor, shard: torch.Tensor) -> SharedWork:
        """Fill `whole` with the parts of all members, in their order."""

        def end(parts: list[torch.Tensor]) -> None:
            for target, part in zip(whole.view(self._size, *shard.shape), parts, strict=True):
                target.copy_(part)

        return self._exchange(shard, end)

    def _exchange(
        self, part: torch.Tensor, end: Callable[[list[torch.Tensor]], None]
    ) -> SharedWork:
        """Write this member's part, and return what reads those of all."""
        if self._under_way is not None:
            self._under_way.wait()
        self._number += 1
        number, shape = self._number, part.shape
        self._views(self._index, part)[:] = part.reshape(-1)
        self._numbers[self._index * _LINE // 8] = number

        def read() -> None:
            self._under_way = None
            for member in range(self._size):
                self._look(member, number)
            end([self._views(member, part).view(shape) for member in range(self._size)])

        self._under_way = SharedWork(read)
        return self._under_way

    def _views(self, member: int, like: torch.Tensor) -> torch.Tensor:
        """Return the slot of a member for the present operation, as numbers like `like`."""
        slot = self._slots[2 * member + self._number % 2]
        return slot[: like.nbytes].view(like.dtype)

    def _look(self, member: int, number: int) -> None:
        """Return when a member has written its part of operation `number`."""
        numbers, place, looks = self._numbers, member * _LINE // 8, 0
        while numbers[place] < number:
            looks += 1
            if looks > _SPINS + _YIELDS:
                time.sleep(_SLEEP_S)
            elif looks > _SPINS:
                os.sched_yield()


def open_room(
    size: int, index: int, tell: Callable[[object], list[object]], slot_bytes: int
) -> SharedRoom | None:
    """Return memory that all members map; None where they are on several hosts, or can't.

    Every member calls it; `tell` gives what each member said to all, in their order. The largest
    tensor that has room is of `slot_bytes`.
    """
    path = _made(_bytes(size, slot_bytes)) if index == 0 else None
    try:
        told = tell((_host(), None if path is None else str(path)))
        hosts = {str(one[0]) for one in told if isinstance(one, tuple)}
        named = told[0][1] if isinstance(told[0], tuple) else None
        memory = None
        if len(hosts) == 1 and named is not None:
            memory = _mapped(Path(str(named)), _bytes(size, slot_bytes))
        there = tell(memory is not None)
    finally:
        # Whoever has mapped it keeps it; a name that is left would outlive a killed rank.
        if path is not None:
            path.unlink(missing_ok=True)
    if memory is None or not all(there):
        return None
    return SharedRoom(memory, size, index, slot_bytes)


def _host() -> str:
    """Return what tells hosts apart that may have one name."""
    if not KEEPS_ORDER:
        return f"{platform.node()} {os.getpid()}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = str(os.getpid())
    return f"{platform.node()} {boot}"


def _bytes(size: int, slot_bytes: int) -> int:
    return size * (_LINE + 2 * slot_bytes)


def _made(num_bytes: int) -> Path | None:
    if not os.access(_HOME, os.W_OK):
        return None
    try:
        with NamedTemporaryFile(prefix="echelon-room-", dir=_HOME, delete=False) as file:
            file.truncate(num_bytes)
            # Pages are taken here: a store into one that memory has no room for would be a kill.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return Path(file.name)
    except OSError:
        return None


def _mapped(path: Path, num_bytes: int) -> mmap.mmap | None:
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), num_bytes)
    except (OSError, ValueError):
        return None
