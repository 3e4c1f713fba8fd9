"""A bounded number of buffers that are used again and again."""

from __future__ import annotations

import torch

from echelon.core.offload_file import PAGE
from echelon.parallel.offload.memory import Allocate


class Buffers:
    """Hand out at most `count` buffers at once, each as large as the largest set so far."""

    def __init__(self, count: int, allocate: Allocate) -> None:
        """Allocate nothing yet."""
        assert count > 0, "a set needs a buffer"
        self._count, self._allocate = count, allocate
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}
        self._largest = PAGE

    def take(self, size: int) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes, or None while all are taken."""
        self._largest = max(self._largest, size)
        if len(self._taken) >= self._count:
            return None
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.nbytes < self._largest:
            # One that is too small for some set is so for good: sets come round again every step.
            buffer = self._allocate(self._largest)
        self._taken[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._free.append(self._taken.pop(buffer.data_ptr()))

    def clear(self) -> None:
        """Forget all buffers; those that are taken live as long as whoever has them."""
        self._free.clear()
        self._taken.clear()

    def num_bytes(self) -> int:
        """Return the bytes of the storages of all buffers."""
        return sum(
            buffer.untyped_storage().nbytes() for buffer in (*self._free, *self._taken.values())
        )
