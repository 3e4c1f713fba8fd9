"""Weights as a folder of torch.distributed.checkpoint, by torch's own writer.

It asks its planner for one tensor at a time, and gets it made from the checkpoint.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.core.disk import disk_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Say how a tensor that is written lies in one of the folder, and how to make it."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


class _Planner(DefaultSavePlanner):
    """Plan chunks that are made when they are asked for."""

    def __init__(
        self, chunks: Sequence[Chunk], dtype: torch.dtype, objects: Mapping[str, bytes]
    ) -> None:
        super().__init__()
        self._chunks, self._dtype, self._objects = chunks, dtype, objects
        self._by_place = {(chunk.key, chunk.offset): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """Return one item for each chunk."""
        counts: dict[str, int] = {}
        items: list[WriteItem] = []
        for chunk in self._chunks:
            place = counts.get(chunk.key, 0)
            counts[chunk.key] = place + 1
            items.append(_item(chunk, place, self._dtype))
        items += [
            WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._objects
        ]
        # By these names who loads a folder without a model finds its keys.
        names = {key: (key,) for key in (*counts, *self._objects)}
        self.plan = SavePlan(items, planner_data=names)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor of an item, or the bytes of an object."""
        if index.offset is None:
            return io.BytesIO(self._objects[index.fqn])
        return self._by_place[index.fqn, tuple(index.offset)].make()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the tensor as it is: torch's planner names the argument."""
        return object


def _item(chunk: Chunk, place: int, dtype: torch.dtype) -> WriteItem:
    offset, shape = torch.Size(chunk.offset), torch.Size(chunk.shape)
    return WriteItem(
        index=MetadataIndex(chunk.key, offset, place),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=shape),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(chunk.whole),
        ),
    )


def write_distributed(
    chunks: Sequence[Chunk],
    folder: Path,
    dtype: torch.dtype,
    threads: int,
    objects: Mapping[str, bytes] | None = None,
) -> None:
    """Write chunks of tensors, `threads` files at a time, each of which holds a tensor.

    `objects` are what torch.save writes of other things, by key. EnvironmentProblem where the disk
    refuses.
    """
    planner = _Planner(chunks, dtype, objects or {})
    with disk_errors(f"to write into {folder}"):
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, sync_files=True, thread_count=threads
        )
        with warnings.catch_warnings():
            # torch notes that no other process saves: none is meant to.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save({}, storage_writer=writer, planner=planner, no_dist=True)
