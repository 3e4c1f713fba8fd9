"""A piece of a canonical tensor: what a rank says about each thing that it holds.

Checkpoints and proofs know tensors by their canonical name and whole shape only; whatever holds
them (a flat bucket, a tensor-parallel slice, a pipeline stage) is told in shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Hold a rectangle of a canonical tensor, padding already cut off.

    `tensor` (any shape of the rectangle) starts at `offset` in a tensor of `global_shape`.
    `primary` is True on exactly one of the ranks that hold the same rectangle.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    primary: bool
