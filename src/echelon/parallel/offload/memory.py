"""Memory of the host in whole pages, locked where a GPU is to copy it while it computes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch

from echelon.core.errors import EnvironmentProblem
from echelon.core.offload_file import whole_pages
from echelon.core.rulebook.offload import OFFLOAD_HOST_MEMORY
from echelon.core.units import binary_bytes

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
        held = pages(whole_pages(size))
    except (OSError, MemoryError) as error:
        raise EnvironmentProblem(
            OFFLOAD_HOST_MEMORY.problem(
                f"{doing} {binary_bytes(size)} in the memory of the host failed: {error}"
            )
        ) from error
    return torch.frombuffer(held, dtype=torch.uint8, count=size)
