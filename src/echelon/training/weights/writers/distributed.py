# SPDX-License-Identifier: Apache-2.0
"""Weights as a folder of torch.distributed.checkpoint, a tensor at a time.

torch's own writer holds a tensor while it asks for the next one, and its files are those of the
ranks that write. Here files are those of the folder, whoever writes them: each holds what
torch.save makes of some tensors, one after the other, and `.metadata`, which says where each lies,
is written last, by torch's classes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] - readers look for this class
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from echelon.core.disk import disk_errors, flush_file, write_durably
from echelon.training.weights.writers.shares import FolderPart, TensorRoom, Writers

NUM_FILES = 16
"""Files that the tensors of a folder are shared out to, where they have at most FILE_BYTES."""
FILE_BYTES = 5_000_000_000  # of a file
_METADATA = ".metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Say how a tensor that is written lies in one of the folder, and how to make it."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


_Places = Sequence[tuple[int, int]]
"""Of each item of a file the byte at which it begins, and how many it has."""


def write_distributed(
    chunks: Sequence[Chunk],
    folder: Path,
    dtype: torch.dtype,
    writers: Writers,
    objects: Mapping[str, bytes] | None = None,
) -> None:
    """Write chunks of tensors; all ranks call it.

    `objects` are what torch.save writes of other things, by key. CheckpointError where the
    checkpoint can't be read, EnvironmentProblem where the disk refuses.
    """
    shared = objects or {}
    files = share_chunks(chunks, dtype.itemsize)
    parts = [
        _part(file, group, folder, dtype.itemsize, shared if place == 0 else {})
        for place, (file, group) in enumerate(files.items())
    ]
    found: Mapping[str, _Places] = writers.write(parts)
    writers.on_first(lambda: _write_metadata(folder, dtype, files, shared, found))


def num_files(num_tensors: int, num_bytes: int) -> int:
    """Return how many files the tensors of a folder are shared out to, each with one at least."""
    return min(num_tensors, max(NUM_FILES, -(-num_bytes // FILE_BYTES)))


def share_chunks(chunks: Sequence[Chunk], item_bytes: int) -> Mapping[str, tuple[Chunk, ...]]:
    """Return the chunks of each file: about as many bytes in all of them, in the given order."""
    sizes = [prod(chunk.shape) * item_bytes for chunk in chunks]
    count = num_files(len(chunks), sum(sizes))
    held, owners = [0] * count, [0] * len(chunks)
    for place in sorted(range(len(chunks)), key=lambda one: -sizes[one]):
        owners[place] = held.index(min(held))
        held[owners[place]] += sizes[place]
    return {
        f"__0_{file}.distcp": tuple(
            chunk for chunk, owner in zip(chunks, owners, strict=True) if owner == file
        )
        for file in range(count)
    }


def _part(
    name: str, chunks: Sequence[Chunk], folder: Path, item_bytes: int, objects: Mapping[str, bytes]
) -> FolderPart:
    sizes = [prod(chunk.shape) * item_bytes for chunk in chunks]

    def write(room: TensorRoom) -> _Places:
        places: list[tuple[int, int]] = []
        with disk_errors(f"to write into {folder}"), (folder / name).open("xb") as stream:
            for chunk, size in zip(chunks, sizes, strict=True):
                with room.hold(size):
                    places.append(_saved(stream, chunk))
            for content in objects.values():
                start = stream.tell()
                stream.write(content)
                places.append((start, len(content)))
            stream.flush()
            flush_file(stream.fileno())
        return places

    return FolderPart(name=name, file=name, num_bytes=sum(sizes), largest=max(sizes), write=write)


def _saved(stream: BinaryIO, chunk: Chunk) -> tuple[int, int]:
    """Write what torch.save makes of a tensor; return where it begins and its bytes."""
    start = stream.tell()
    torch.save(chunk.make(), stream)
    return start, stream.tell() - start


def _write_metadata(
    folder: Path,
    dtype: torch.dtype,
    files: Mapping[str, Sequence[Chunk]],
    objects: Mapping[str, bytes],
    found: Mapping[str, _Places],
) -> None:
    """Write what is in which file, whole or not at all."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number, (name, chunks) in enumerate(files.items()):
        for chunk, (start, length) in zip(chunks, found[name], strict=False):
            entry = tensors.setdefault(
                chunk.key,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=dtype),
                    size=torch.Size(chunk.whole),
                    chunks=[],
                ),
            )
            assert isinstance(entry, TensorStorageMetadata), "no object has the name of a tensor"
            offset = torch.Size(chunk.offset)
            index = MetadataIndex(chunk.key, offset, len(entry.chunks))
            entry.chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size(chunk.shape)))
            places[index] = _StorageInfo(name, start, length)
        if number == 0:
            for key, (start, length) in zip(objects, found[name][len(chunks) :], strict=True):
                tensors[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = _StorageInfo(name, start, length)
    content = Metadata(
        state_dict_metadata=dict(tensors),
        # By these names who loads a folder without a model finds its keys.
        planner_data={key: (key,) for key in tensors},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    stream = io.BytesIO()
    pickle.dump(content, stream)
    with disk_errors(f"to write into {folder}"):
        unnamed = folder / f"{_METADATA}.tmp"
        write_durably(unnamed, stream.getvalue())
        unnamed.rename(folder / _METADATA)
