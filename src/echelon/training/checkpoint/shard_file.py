# SPDX-License-Identifier: Apache-2.0
"""One rank's file: its primary shards, in the safetensors format, hashed as they are written.

The format is eight bytes of header length, a JSON header, and the bytes of the tensors. It is
written here tensor by tensor, for the library's writer first copies all of them.

It is read a few megabytes at a time. Only rows that are wanted are read, into one small buffer and
from there into the tensor that they fill: so a rank never holds more than that tensor and the
buffer. (A mapped file would do with less code, but its pages count as memory of the process, all of
them in the end.) An allocator keeps freed memory for later, for each thread by itself: a run that
makes one large tensor after the other, on several threads, would hold several in the end.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from echelon.core.disk import disk_errors, flush_file, flush_folder, read_all
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.index import CheckpointFileEntry, ShardEntry

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Shards = Mapping[str, Mapping[str, Sequence[Shard]]]
"""Shards by kind ("parameters", "optimizer.exp_avg", ...), then by canonical name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """Say of one piece in a file what the index must know."""

    kind: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    entry: ShardEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """Say what a rank wrote: its file (None: it is primary for nothing) and the pieces in it."""

    file: str
    entry: CheckpointFileEntry | None
    shards: tuple[WrittenShard, ...]


def write_shard_file(folder: Path, file: str, shards: Shards) -> WrittenFile:
    """Write the primary shards to `folder`/`file`, flush file and folder, and say what was written.

    Tensors are stored bit for bit in their own dtype. EnvironmentProblem where the disk refuses.
    """
    found = _primary(file, shards)
    if not found:
        return WrittenFile(file=file, entry=None, shards=())
    # Wide elements first keeps every tensor aligned to its element, as the library does.
    found.sort(key=lambda item: (-item[1].tensor.element_size(), item[0].entry.key))
    header = safetensors_header(
        (stored.entry.key, shard.tensor.dtype, stored.entry.shape) for stored, shard in found
    )
    digest, size = hashlib.sha256(header), len(header)
    with disk_errors(f"to write into {folder.parent}"), (folder / file).open("xb") as stream:
        stream.write(header)
        for _, shard in found:
            data = tensor_bytes(shard.tensor)
            digest.update(data)
            stream.write(data)
            size += len(data)
        stream.flush()
        flush_file(stream.fileno())
        flush_folder(folder)
    return WrittenFile(
        file=file,
        entry=CheckpointFileEntry(size_bytes=size, sha256=digest.hexdigest()),
        shards=tuple(stored for stored, _ in found),
    )


def _primary(file: str, shards: Shards) -> list[tuple[WrittenShard, Shard]]:
    found: list[tuple[WrittenShard, Shard]] = []
    for kind, name, shard in every_shard(shards):
        if not shard.primary:
            continue
        start = ",".join(map(str, shard.offset))
        piece = ShardEntry(
            file=file,
            key=f"{kind}/{name}@{start}",
            offset=tuple(shard.offset),
            shape=tuple(shard.tensor.shape),
        )
        stored = WrittenShard(
            kind=kind,
            name=name,
            dtype=DTYPE_NAMES[shard.tensor.dtype],
            global_shape=tuple(shard.global_shape),
            entry=piece,
        )
        found.append((stored, shard))
    return found


def every_shard(shards: Shards) -> Iterator[tuple[str, str, Shard]]:
    """Yield each shard that has elements, with its kind and its name."""
    for kind, by_name in shards.items():
        for name, pieces in by_name.items():
            for shard in pieces:
                if shard.tensor.numel():
                    yield kind, name, shard


def safetensors_header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """Return what a safetensors file begins with: key, dtype and shape of each tensor, in order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, dtype, shape in tensors:
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[key] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as they stand in a file."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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


def row_buffer(
    rows: StoredRows, buffer: torch.Tensor | None, pieces: PieceSizes = TRAINING_PIECES
) -> torch.Tensor:
    """Return `buffer` where a row has room in it, or one in which it has."""
    size = max(pieces.buffer_bytes, rows.row_bytes)
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
