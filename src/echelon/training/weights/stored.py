# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie in files: rectangles of them, each a run of bytes of some file.

A tensor of a safetensors file is one such block. In checkpoints of trainers it is in several: the
shards of ranks, the part of a flat buffer that a data rank keeps. Tensors are looked at as matrices
here: all dims but the last count rows, and of a tensor of one dim each element is a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from echelon.core.piece_sizes import TRAINING_PIECES

DTYPE_SIZES: Mapping[str, int] = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Say where a rectangle of a tensor lies: `height` rows of `width`, from (`row`, `column`) on.

    It begins at byte `start` of `file`, row after row.
    """

    file: Path
    start: int
    row: int
    column: int
    height: int
    width: int

    def start_of(self, row: int, column: int, item: int) -> int:
        """Return the byte at which an element of the tensor begins, of `item` bytes each."""
        return self.start + ((row - self.row) * self.width + column - self.column) * item


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Give a tensor of a folder: its dtype as safetensors spells it, its shape, where it lies."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return prod(self.shape) * DTYPE_SIZES[self.dtype]

    @property
    def lacking(self) -> int:
        """Return how many elements no file holds; below 0 where some are held twice."""
        return prod(self.shape) - sum(block.height * block.width for block in self.blocks)


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


def whole(file: Path, start: int, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return a tensor that lies in one piece."""
    height, width = matrix(shape)
    block = StoredBlock(file=file, start=start, row=0, column=0, height=height, width=width)
    return StoredTensor(dtype=dtype, shape=shape, blocks=(block,))


def cut_blocks(
    file: Path,
    start: int,
    item: int,
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
) -> Iterator[StoredBlock]:
    """Yield the blocks of a part of a tensor that is stored by itself, dim after dim.

    The part is of `size` and begins at `offset` of a tensor of `shape`, whose elements have `item`
    bytes.
    """
    if prod(size) == 0:
        return
    dims, corner, cut = list(shape), list(offset), list(size)
    if len(dims) < 2:
        dims, corner, cut = [*dims, 1], [*corner, 0], [*cut, 1]
    # Dims that are whole belong to the one before them.
    while len(dims) > 2 and cut[-2] == dims[-2]:
        dims[-3:-1] = [dims[-3] * dims[-2]]
        corner[-3:-1] = [corner[-3] * cut[-2]]
        cut[-3:-1] = [cut[-3] * cut[-2]]
    *outer, height, width = cut
    for place in range(prod(outer)):
        index, rest = 0, place
        for at in range(len(outer)):
            rest_of = prod(outer[at + 1 :])
            position, rest = divmod(rest, rest_of)
            index = index * dims[at] + corner[at] + position
        yield StoredBlock(
            file=file,
            start=start + place * height * width * item,
            row=index * dims[-2] + corner[-2],
            column=corner[-1],
            height=height,
            width=width,
        )


def flat_blocks(
    file: Path, start: int, item: int, shape: Sequence[int], first: int, count: int
) -> Iterator[StoredBlock]:
    """Yield the blocks of `count` elements from `first` on of a tensor that is laid out flat.

    They are part of a row, whole rows, and part of one more.
    """
    width = matrix(shape)[1]
    end = first + count
    while first < end:
        row, column = divmod(first, width)
        if column == 0 and end - first >= width:
            height, size = (end - first) // width, width
        else:
            height, size = 1, min(width - column, end - first)
        yield StoredBlock(file=file, start=start, row=row, column=column, height=height, width=size)
        first += height * size
        start += height * size * item


def same_values(one: StoredTensor, two: StoredTensor, rows: int) -> bool:
    """Return whether the first `rows` rows of two tensors have the same bytes."""
    if one.dtype != two.dtype or one.shape[1:] != two.shape[1:]:
        return False
    item = DTYPE_SIZES[one.dtype]
    return all(
        _same_bytes(first, second, rows, item) for first in one.blocks for second in two.blocks
    )


def _same_bytes(one: StoredBlock, two: StoredBlock, rows: int, item: int) -> bool:
    """Return whether two blocks agree where they meet."""
    top, end = max(one.row, two.row), min(one.row + one.height, two.row + two.height, rows)
    left = max(one.column, two.column)
    right = min(one.column + one.width, two.column + two.width)
    if top >= end or left >= right:
        return True
    if one.start_of(top, left, item) == two.start_of(top, left, item) and one.file == two.file:
        return True
    together = one.width == two.width == right - left
    height = max(1, TRAINING_PIECES.compared_bytes // ((right - left) * item)) if together else 1
    with one.file.open("rb") as first, two.file.open("rb") as second:
        for row in range(top, end, height):
            size = min(height, end - row) * (right - left) * item
            first.seek(one.start_of(row, left, item))
            second.seek(two.start_of(row, left, item))
            if first.read(size) != second.read(size):
                return False
    return True


def layers_of(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the tensors that are stacked in one, along its first dim."""
    inner = tensor.shape[1:]
    rows = matrix(inner)[0]
    if len(inner) == 1:
        # Of [L, N] each row is a tensor of N, which is looked at as N rows of one.
        yield from _rows_of(tensor, inner)
        return
    for layer in range(tensor.shape[0]):
        first = layer * rows
        yield StoredTensor(
            dtype=tensor.dtype,
            shape=inner,
            blocks=tuple(_within(tensor, first, rows)),
        )


def _within(tensor: StoredTensor, first: int, rows: int) -> Iterator[StoredBlock]:
    item = DTYPE_SIZES.get(tensor.dtype, 1)
    for block in tensor.blocks:
        begin, end = max(first, block.row), min(first + rows, block.row + block.height)
        if begin < end:
            yield StoredBlock(
                file=block.file,
                start=block.start + (begin - block.row) * block.width * item,
                row=begin - first,
                column=block.column,
                height=end - begin,
                width=block.width,
            )


def _rows_of(tensor: StoredTensor, inner: tuple[int, ...]) -> Iterator[StoredTensor]:
    item = DTYPE_SIZES.get(tensor.dtype, 1)
    for layer in range(tensor.shape[0]):
        blocks = [
            StoredBlock(
                file=block.file,
                start=block.start + (layer - block.row) * block.width * item,
                row=block.column,
                column=0,
                height=block.width,
                width=1,
            )
            for block in tensor.blocks
            if block.row <= layer < block.row + block.height
        ]
        yield StoredTensor(dtype=tensor.dtype, shape=inner, blocks=tuple(blocks))
