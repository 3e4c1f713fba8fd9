# SPDX-License-Identifier: Apache-2.0
"""One rank's file: its primary shards, in the safetensors format, hashed as they are written.

The format is eight bytes of header length, a JSON header, and the bytes of the tensors. It is
written here tensor by tensor, for the library's writer first copies all of them; it is read with
the library.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from echelon.core.disk import disk_errors, flush_file, flush_folder
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
