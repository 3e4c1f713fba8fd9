"""Whole rectangles of random numbers."""

from __future__ import annotations

import torch

from echelon.models.counter_random import normal_pieces


def normal_rectangle(
    key: int, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> torch.Tensor:
    """Return the rectangle at `offset` of a standard normal tensor of `shape`, float64."""
    whole = torch.empty(size, dtype=torch.float64)
    for part, values in normal_pieces(whole, key, shape, offset):
        part.copy_(values)
    return whole
