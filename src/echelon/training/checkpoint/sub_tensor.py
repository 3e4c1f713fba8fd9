# SPDX-License-Identifier: Apache-2.0
"""A part of a stored tensor, read into place a few megabytes at a time.

Only rows that are wanted are read, into one small buffer and from there into the tensor that they
fill: so a rank never holds more than that tensor and the buffer. (A mapped file would do with less
code, but its pages count as memory of the process, all of them in the end.)

An allocator keeps what is freed for later, for each thread by itself: whoever makes one large
tensor after the other, on several threads, would hold several in the end.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from echelon.core.disk import read_all

BUFFER_BYTES = 2 * 2**20
"""Bytes that are read at once, or a row where that has more: small beside the slice of a rank."""

_LEAST_BYTES = 2**16
"""Below it the allocator's own is used: pages are 4 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Say which rows and columns of a stored matrix go where; `target` is [rows, columns].

    The matrix begins at byte `start` of its file and is `width` columns wide. The rows are each
    `step`-th from `row` on, the columns each `column_step`-th from `column` on.
    """

    start: int
    dtype: torch.dtype
    width: int
    row: int
    column: int
    target: torch.Tensor
    step: int = 1
    column_step: int = 1

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a stored row."""
        return self.width * self.dtype.itemsize

    def blocks(
        self, descriptor: int, buffer: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield some rows of the target at a time, with their values as they are in the file.

        `buffer` has room for a row at least, and what is yielded lies in it. OSError where the file
        ends early.
        """
        num_rows, num_columns = self.target.shape
        # Of a single row only the columns are read that are asked for, of several all of each.
        span = (num_columns - 1) * self.column_step + 1
        begin, width = (self.column, span) if num_rows == 1 else (0, self.width)
        skip, item = self.column - begin, self.dtype.itemsize
        rows_at_once = max(1, buffer.numel() // (width * item * self.step))
        memory = buffer.numpy().data
        for first in range(0, num_rows, rows_at_once):
            part = self.target[first : first + rows_at_once]
            # What lies between two rows is read with them, and left out.
            size = ((part.shape[0] - 1) * self.step + 1) * width * item
            position = ((self.row + first * self.step) * self.width + begin) * item
            read_all(descriptor, memory[:size], self.start + position)
            block = buffer[:size].view(self.dtype).view(-1, width)[:: self.step]
            yield part, block[:, skip : skip + span : self.column_step]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """Say where a tensor lies in a safetensors file: from which byte on, of which shape."""

    start: int
    shape: tuple[int, ...]

    def rows(self, cut: Sequence[slice], target: torch.Tensor) -> Iterator[StoredRows]:
        """Yield what to read to fill `target` with the part `cut` out of it, one slice a dim."""
        shape, cuts = list(self.shape), list(cut)
        while len(shape) < 2:
            shape, cuts, target = [1, *shape], [slice(0, 1), *cuts], target.unsqueeze(0)
        (*outer, height, width), item = shape, target.dtype.itemsize
        *outer_cuts, rows, columns = cuts
        for place in product(*(range(one.start, one.stop) for one in outer_cuts)):
            index = 0
            for position, size in zip(place, outer, strict=True):
                index = index * size + position
            yield StoredRows(
                start=self.start + index * height * width * item,
                dtype=target.dtype,
                width=width,
                row=rows.start,
                column=columns.start,
                target=target[tuple(p - c.start for p, c in zip(place, outer_cuts, strict=True))],
            )


def read_pieces(path: Path) -> Mapping[str, StoredPiece]:
    """Return where each tensor of a safetensors file lies.

    OSError where it cannot be read, ValueError where it is no such file.
    """
    with path.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if length > os.fstat(stream.fileno()).st_size:
            raise ValueError(f"its header of {length} bytes ends after the file")
        header: Any = json.loads(stream.read(length))
    try:
        header.pop("__metadata__", None)
        found = {
            str(key): (tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for key, entry in header.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not one of safetensors: {error!r}") from error
    return {
        key: StoredPiece(start=8 + length + begin, shape=shape)
        for key, (shape, begin, _) in found.items()
    }


def row_buffer(rows: StoredRows, buffer: torch.Tensor | None) -> torch.Tensor:
    """Return `buffer` where a row has room in it, or one in which it has."""
    size = max(BUFFER_BYTES, rows.row_bytes)
    if buffer is None or buffer.numel() < size:
        return own_memory((size,), torch.uint8)
    return buffer


def own_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros on the CPU; pages that nobody writes to are not taken."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
