"""The gradient norm, from slices: every logical parameter counts exactly once.

Ranks that hold other slices, other tensor slices or other stages add up what each gives here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from echelon.parallel.buckets import Bucket

_CHUNK = 1 << 16


def local_norm_squared(buckets: Sequence[Bucket]) -> float:
    """Return the sum of squares of the gradients that count in the slices of this rank.

    Short runs are added in the gradient's own precision (at least float32), the runs in float64;
    what is not finite stays so.
    """
    sums = [torch.dot(run, run) for bucket in buckets for run in _runs(bucket)]
    return float(torch.stack(sums).double().sum()) if sums else 0.0


def _runs(bucket: Bucket) -> Iterator[torch.Tensor]:
    gradient = bucket.gradient_slice
    # Runs as long as a cache on CPU; on a GPU fewer and longer ones, whose sums are trees.
    length = _CHUNK if gradient.device.type == "cpu" else 256 * _CHUNK
    for part in bucket.counted_ranges():
        for run in gradient[bucket.within_own(part)].split(length):
            if run.numel():
                yield run if run.dtype in (torch.float32, torch.float64) else run.float()
