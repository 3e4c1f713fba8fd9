# SPDX-License-Identifier: Apache-2.0
"""Parameters in flat buffers that data ranks share out: where each lies in all parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from echelon.training.weights.pickles import NotReadable, PickledTensor
from echelon.training.weights.stored import DTYPE_SIZES, StoredBlock, StoredTensor, flat_blocks


def slice_blocks(
    parts: Sequence[PickledTensor], begin: int, count: int, shape: Sequence[int], first: int
) -> Iterator[StoredBlock]:
    """Yield where `count` elements of a tensor, from its element `first` on, lie.

    They are those from `begin` on of `parts`, laid end to end. NotReadable where these end before.
    """
    end = begin + count
    start_of_part = 0
    for part in parts:
        low, high = max(begin, start_of_part), min(end, start_of_part + part.numel)
        if low < high:
            item = DTYPE_SIZES.get(part.dtype, 1)
            byte = part.start + (low - start_of_part) * item
            yield from flat_blocks(part.file, byte, item, shape, first + low - begin, high - low)
        start_of_part += part.numel
    if end > start_of_part:
        raise NotReadable(f"has flat buffers of {start_of_part} elements, and {end} are wanted")


def flat_tensor(parts: Sequence[PickledTensor], begin: int, shape: Sequence[int]) -> StoredTensor:
    """Return a tensor that lies from element `begin` on in `parts`, laid end to end."""
    dims = tuple(shape)
    blocks = tuple(slice_blocks(parts, begin, prod(dims), dims, 0))
    return StoredTensor(dtype=parts[0].dtype, shape=dims, blocks=blocks)


def shared_tensor(
    ranks: Sequence[Sequence[PickledTensor]], begin: int, shape: Sequence[int]
) -> StoredTensor:
    """Return a tensor of which each rank has an equal part, from element `begin` of its own on.

    The last parts are padded.
    """
    dims = tuple(shape)
    size = -(-prod(dims) // len(ranks))
    blocks: list[StoredBlock] = []
    for rank, parts in enumerate(ranks):
        first = rank * size
        count = min(size, prod(dims) - first)
        if count > 0:
            blocks.extend(slice_blocks(parts, begin, count, dims, first))
    return StoredTensor(dtype=ranks[0][0].dtype, shape=dims, blocks=tuple(blocks))
