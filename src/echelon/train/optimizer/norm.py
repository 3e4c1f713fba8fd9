"""The gradient norm, from slices: every logical parameter counts exactly once.

Ranks that hold other slices, other tensor slices or other stages add up what each gives here. What
counts elsewhere adds nothing here, unless it is not finite: a copy that is NaN on one rank alone
must stop the update of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from echelon.parallel.buckets import Bucket

_CHUNK = 1 << 16


def local_norm_squared(
    buckets: Sequence[Bucket], counts: Callable[[Bucket], bool] = lambda bucket: True
) -> float:
    """Return the sum of squares of the gradients that count in the slices of this rank.

    `counts` says of a bucket whether this rank counts for all that hold the same.
    Short runs are added in the gradient's own precision (at least float32), the runs in float64;
    what is not finite stays so.
    """
    sums: list[torch.Tensor] = []
    for bucket in buckets:
        counted = bucket.counted_ranges() if counts(bucket) else []
        sums.extend(torch.dot(run, run) for run in _runs(bucket, counted))
        others = between(counted, bucket.slots[-1].end)
        sums.extend(torch.dot(run, run) * 0.0 for run in _runs(bucket, others))
    return float(torch.stack(sums).double().sum()) if sums else 0.0


def between(ranges: Sequence[slice], end: int) -> list[slice]:
    """Return what of the elements before `end` is in none of `ranges`, which are in order."""
    starts = [0, *(part.stop for part in ranges)]
    stops = [*(part.start for part in ranges), end]
    return [slice(a, b) for a, b in zip(starts, stops, strict=True) if b > a]


def _runs(bucket: Bucket, parts: Sequence[slice]) -> Iterator[torch.Tensor]:
    gradient = bucket.gradient_slice
    # Runs as long as a cache on CPU; on a GPU fewer and longer ones, whose sums are trees.
    length = _CHUNK if gradient.device.type == "cpu" else 256 * _CHUNK
    for part in parts:
        for run in gradient[bucket.within_own(part)].split(length):
            if run.numel():
                yield run if run.dtype in (torch.float32, torch.float64) else run.float()
