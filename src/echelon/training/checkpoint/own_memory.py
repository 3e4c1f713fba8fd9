# SPDX-License-Identifier: Apache-2.0
"""Memory for a tensor that goes back to the system as soon as nobody has the tensor.

An allocator keeps what is freed for later, for each thread by itself: whoever makes one large
tensor after the other, on several threads, would hold several in the end.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch

_LEAST_BYTES = 2**16
"""Below it the allocator's own is used: pages are 4 KiB."""


def own_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros on the CPU; pages that nobody writes to are not taken."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
