# SPDX-License-Identifier: Apache-2.0
"""Flat tensors whose memory comes and goes while their views stay.

A bucket that is not needed gives its memory back. There are two ways. `OwnedTensorMemory` empties
the storage itself: every view of it, also one that autograd has saved, is right again once the
storage is filled; the allocator finds the memory (the caching one of a GPU does so well).
`PooledTensorMemory` takes the memory from a `BufferPool` that other buckets use in turn: nothing
is given back to the C library, whose heap would be in pieces after a few steps (glibc's aligned
allocation never fits into a hole of the size that it left), so a step needs the same few pieces of
memory every time.
"""

from __future__ import annotations

import torch


class _ViewedMemory:
    """Memory of a flat tensor that has views."""

    def add_view(self, view: torch.Tensor) -> None:
        """Let a view follow the flat tensor: where it has the same storage, it does so already."""

    def rows(self, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a part of the flat tensor as one matrix, whose rows are those of `like`.

        The view lasts; it is made while the memory is there.
        """
        view = part.view(-1, *like.shape[1:])
        self.add_view(view)
        return view


class OwnedTensorMemory(_ViewedMemory):
    """Memory that belongs to the storage of a flat tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        """Hold the memory of `flat`, which is there."""
        self._storage = flat.untyped_storage()
        self._bytes = self._storage.size()

    @property
    def present(self) -> bool:
        """Return whether the storage is filled."""
        return self._storage.size() > 0

    def allocate(self) -> None:
        """Fill the storage."""
        if not self.present:
            self._storage.resize_(self._bytes)

    def release(self) -> None:
        """Empty the storage."""
        self._storage.resize_(0)


class BufferPool:
    """Pieces of memory that flat tensors use in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self.num_buffers = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return the smallest free piece that is large enough; a new one where none is near.

        A piece of more than twice the size is left for those that need it. Of equal pieces, the
        last one to come back is the one that caches still hold.
        """
        fitting = [one for one in self._free if num_bytes <= one.numel() <= 2 * num_bytes]
        if not fitting:
            self.num_buffers += 1
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        piece = min(reversed(fitting), key=torch.Tensor.numel)
        self._free = [one for one in self._free if one is not piece]
        return piece

    def give_back(self, piece: torch.Tensor) -> None:
        """Take a piece that was lent."""
        self._free.append(piece)


class PooledTensorMemory(_ViewedMemory):
    """Memory that a pool lends to a flat tensor and its views."""

    def __init__(self, num_elements: int, dtype: torch.dtype, pool: BufferPool) -> None:
        """Borrow the memory of a flat tensor of `num_elements`, and make it (`flat`)."""
        self._pool = pool
        self._bytes = num_elements * dtype.itemsize
        self._buffer: torch.Tensor | None = pool.take(self._bytes)
        storage = self._buffer.untyped_storage()
        flat = torch.empty(0, dtype=dtype, device=storage.device)
        self.flat = flat.set_(storage, 0, (num_elements,), (1,))
        self._views = [self.flat]

    @property
    def present(self) -> bool:
        """Return whether the flat tensor has a piece of the pool."""
        return self._buffer is not None

    @torch.no_grad()
    def allocate(self) -> None:
        """Borrow a piece, and point the flat tensor and its views to it."""
        if self._buffer is not None:
            return
        self._buffer = self._pool.take(self._bytes)
        storage = self._buffer.untyped_storage()
        for view in self._views:
            view.set_(storage, view.storage_offset(), view.size(), view.stride())

    def release(self) -> None:
        """Give the piece back; the views must not be read until there is another."""
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
            self._buffer = None

    def add_view(self, view: torch.Tensor) -> None:
        """Let another view follow the flat tensor."""
        self._views.append(view)


TensorMemory = OwnedTensorMemory | PooledTensorMemory
"""The memory of one flat tensor and of its views."""
