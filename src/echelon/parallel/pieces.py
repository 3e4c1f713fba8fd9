"""Rows of a tensor in pieces, for what is computed in another dtype than it is kept in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CACHE_ELEMENTS = 1 << 18
"""A piece on a CPU: about this many elements stay in cache between two passes over them."""

DEVICE_ELEMENTS = 1 << 24
"""A piece on a GPU, 64 MiB of float32: enough to keep it busy, little beside the whole."""


def row_pieces(x: torch.Tensor) -> Iterator[slice]:
    """Yield slices that cut the first dim of x into pieces."""
    num_rows = x.shape[0]
    limit = CACHE_ELEMENTS if x.device.type == "cpu" else DEVICE_ELEMENTS
    piece = max(1, limit * num_rows // max(1, x.numel()))
    for start in range(0, num_rows, piece):
        yield slice(start, min(start + piece, num_rows))
