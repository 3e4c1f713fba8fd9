"""AdamW on flat buckets: one fused call for all, exact global norm, clipping.

The optimizer sees the segments of the buckets (`parallel/buckets.py`), not parameters: a segment
is one long vector that decays or does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echelon.core.plan import Optimizer
from echelon.parallel.buckets import Bucket

_CHUNK = 1 << 16

STATE_KINDS = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """AdamW (Loshchilov and Hutter, 2019) over the buckets of a rank."""

    def __init__(self, buckets: Sequence[Bucket], settings: Optimizer) -> None:
        """Hold first and second moments, in the layout of the buckets."""
        self.settings = settings
        self.moments = {
            kind: [torch.zeros_like(bucket.values) for bucket in buckets] for kind in STATE_KINDS
        }
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        self._steps: list[torch.Tensor] = []
        self._segments: list[tuple[nn.Parameter, dict[str, torch.Tensor]]] = []
        for index, bucket in enumerate(buckets):
            for part, decays in bucket.segments():
                segment = nn.Parameter(bucket.values[part])
                segment.grad = bucket.gradients[part]
                state = {kind: self.moments[kind][index][part] for kind in STATE_KINDS}
                self._segments.append((segment, state))
                groups[decays].append(segment)
        self._adamw = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": settings.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self.set_num_steps(0)

    def set_num_steps(self, num_steps: int) -> None:
        """Say how many updates the moments have seen (they are views: fill them in place)."""
        for segment, state in self._segments:
            count = torch.tensor(float(num_steps), device=segment.device)
            self._adamw.state[segment] = {"step": count, **state}

    def update(self, learning_rate: float) -> None:
        """Update the parameters from the gradients in the buckets."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()


def local_norm_squared(buckets: Sequence[Bucket]) -> float:
    """Return the sum of squares of the gradients that count on this rank, added up in float64.

    Every logical parameter counts on exactly one rank of a (pipeline x tensor) group, whatever
    holds it; short runs are added in the gradient's own precision, the runs in float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=buckets[0].gradients.device)
    # Runs as long as a cache on CPU; on a GPU fewer and longer ones, whose sums are trees.
    run = _CHUNK if total.device.type == "cpu" else 256 * _CHUNK
    for bucket in buckets:
        for part in bucket.counted_ranges():
            for piece in bucket.gradients[part].split(run):
                total += torch.dot(piece, piece).double()
    return float(total)


def scale_gradients(buckets: Sequence[Bucket], factor: float) -> None:
    """Multiply the gradients of every bucket by `factor`."""
    for bucket in buckets:
        bucket.gradients.mul_(factor)
