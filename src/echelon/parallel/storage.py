"""Flat tensors whose memory comes and goes while their views stay.

A bucket that is not needed gives its memory back by emptying its storage: parameters, gradients
and joined matrices are views of that storage, and are right again once it is filled. (A view can
only be made while the memory is there.)
"""

from __future__ import annotations

import torch


def has_memory(flat: torch.Tensor) -> bool:
    """Return whether the memory of a flat tensor is there."""
    return flat.untyped_storage().size() > 0


def allocate(flat: torch.Tensor) -> None:
    """Give a flat tensor its memory, with no values in it; keep what is there already."""
    if not has_memory(flat):
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def release(flat: torch.Tensor) -> None:
    """Take the memory of a flat tensor away."""
    flat.untyped_storage().resize_(0)
