"""Gradients on their way to the host and values on their way back, where state rests off the GPU.

The state of an offloaded slice is larger than its gradient and its values, so these travel and the
CPU updates (Ren et al., "ZeRO-Offload", 2021). The gradient of the next bucket is copied while this
one is updated; two buckets have memory on the host at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.parallel.buckets import Bucket
from echelon.parallel.offload.memory import locked_memory


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory of the host for one slice, and the end of the last copy from or to it."""

    gradient: torch.Tensor
    values: torch.Tensor
    copied: torch.cuda.Event


class HostCopies:
    """Copy slices between a GPU and the host, in the order in which they are updated."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """Take memory for two slices as large as the largest one."""
        size = max(bucket.value_slice.numel() for bucket in buckets)
        self._free = deque(_place(size, buckets[0]) for _ in range(2))
        self._taken: deque[_Place] = deque()

    def start(self, bucket: Bucket, *, values: bool) -> None:
        """Start to copy the gradient of a bucket's slice, and its values where they are read."""
        place = self._free.popleft()
        place.copied.synchronize()
        size = bucket.gradient_slice.numel()
        place.gradient[:size].copy_(bucket.gradient_slice, non_blocking=True)
        if values:
            place.values[:size].copy_(bucket.value_slice, non_blocking=True)
        place.copied.record()
        self._taken.append(place)

    def wait(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradient and values of the bucket that was started first."""
        place, size = self._taken[0], bucket.gradient_slice.numel()
        place.copied.synchronize()
        return place.gradient[:size], place.values[:size]

    def give_back(self, bucket: Bucket, *, values: bool) -> None:
        """Start to copy the values back to that bucket, where they were changed here."""
        place = self._taken.popleft()
        if values:
            size = bucket.value_slice.numel()
            bucket.value_slice.copy_(place.values[:size], non_blocking=True)
            place.copied.record()
        self._free.append(place)


def _place(size: int, like: Bucket) -> _Place:
    gradient, values = (
        locked_memory(size * tensor.element_size()).view(tensor.dtype)
        for tensor in (like.gradient_slice, like.value_slice)
    )
    return _Place(gradient, values, torch.cuda.Event())
