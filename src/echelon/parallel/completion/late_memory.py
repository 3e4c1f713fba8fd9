# SPDX-License-Identifier: Apache-2.0
"""Pools and bounded buffers whose free memory is poisoned, and told of by name when it is used."""

from __future__ import annotations

from typing import TypeVar

import torch

from echelon.parallel.completion.in_flight import InFlight
from echelon.parallel.offload.buffers import Allocate, BoundedBuffers
from echelon.parallel.tensor_memory import BufferPool

Owner = TypeVar("Owner")


class LateBufferPool(BufferPool):
    """Pieces of memory that flat tensors use in turn, each poisoned in between."""

    def __init__(self, device: torch.device, flight: InFlight) -> None:
        """Begin with none, on `device`."""
        super().__init__(device)
        self._flight = flight

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a piece that is large enough."""
        piece = super().take(num_bytes)
        self._flight.lend(piece)
        return piece

    def give_back(self, piece: torch.Tensor) -> None:
        """Take a piece that was lent; one that is free already would have two owners next time."""
        if self._flight.free(piece):
            super().give_back(piece)


class LateBuffers(BoundedBuffers[Owner]):
    """A bounded number of buffers, each poisoned while nobody has it."""

    def __init__(self, count: int, allocate: Allocate, flight: InFlight) -> None:
        """Allocate nothing yet."""
        super().__init__(count, allocate)
        self._flight = flight

    def take(self, size: int, owner: Owner) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes, or None while all are taken."""
        before = list(self._free)
        buffer = super().take(size, owner)
        for one in before:
            # Those that are too small are gone for good, and others may get their addresses.
            if not any(one is left for left in self._free):
                self._flight.lend(one)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._flight.free(buffer)
        super().give_back(buffer)

    def clear(self) -> None:
        """Forget all buffers."""
        for buffer in self._free:
            self._flight.lend(buffer)
        super().clear()
