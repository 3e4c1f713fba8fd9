"""Slices in the memory of the host, where a CPU computes on them in place."""

from __future__ import annotations

import torch

from echelon.parallel.offload.memory import Allocate, plain_memory
from echelon.parallel.offload.rest import MemoryRest


class HostRest(MemoryRest):
    """Rest in the memory of the host; without a GPU that is a pool for the accounts only."""

    def __init__(self, *, allocate: Allocate = plain_memory) -> None:
        """Rest in what `allocate` returns."""
        super().__init__(torch.device("cpu"), "host")
        self._allocate = allocate

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros; EnvironmentProblem where the host has no memory for them."""
        return self._allocate(numel * dtype.itemsize).view(dtype)
