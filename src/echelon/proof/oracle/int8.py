# SPDX-License-Identifier: Apache-2.0
"""Matrices of integers of 8 bits on one device, written from the definition alone.

A block is so many neighbours of a row. Its step is its largest number over 127, and each number
becomes the nearest multiple of the step, of two the even one; a block of zeros stays as it is.
Rounded are all matrices but those of routers and the table of learned positions. What is not finite
makes its whole block so. Gradients are those of the rounded matrix, and the optimizer changes the
one that is not rounded.

Nothing is shared with what ranks compute with (`parallel/storage/int8_gather.py`): there are no
codes and no messages here. Where two numbers of one block are equally large, or one lies in the
very middle of two multiples, both sides find the same: both begin a step with the same numbers but
for the order of float64 sums, and are compared in float64 alone.
"""

from __future__ import annotations

import torch

from echelon.models.precision import widened

STEPS = 127
"""Multiples of its step that the largest number of a block is."""
_AS_THEY_ARE = ("router.weight", "positions.weight")


def as_gathered(name: str, values: torch.Tensor, block: int) -> torch.Tensor:
    """Return what forward and backward take of a parameter; without a `block`, the parameter."""
    if not block or values.dim() < 2 or name.endswith(_AS_THEY_ARE):
        return values
    tiles = widened(values.detach()).unflatten(-1, (-1, block))
    step = tiles.abs().amax(-1, keepdim=True) / STEPS
    multiples = torch.where(step == 0, 0.0, (tiles / step).round())
    rounded = torch.where(step.isfinite(), multiples * step, torch.nan)
    return rounded.flatten(-2).to(values.dtype)
