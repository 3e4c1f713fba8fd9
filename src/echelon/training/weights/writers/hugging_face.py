# SPDX-License-Identifier: Apache-2.0
"""Weights as safetensors files of Hugging Face, each tensor into its place in a file.

Where a tensor goes is known before any is made. So files are made with their headers first, and
ranks and threads fill them in whatever order: the bytes are those that one would write.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from echelon.core.disk import disk_errors, flush_file
from echelon.interop.hugging_face.folder import FolderTensor
from echelon.training.checkpoint.shard_file import safetensors_header, tensor_bytes
from echelon.training.weights.export import StoredModel, filled
from echelon.training.weights.writers.shares import FolderPart, TensorRoom, Writers

Files = Mapping[str, Sequence[FolderTensor]]
"""The tensors of each file, in order."""


def write_files(
    model: StoredModel, files: Files, folder: Path, dtype: torch.dtype, writers: Writers
) -> None:
    """Write each file into `folder`; all ranks call it.

    CheckpointError where the checkpoint can't be read, EnvironmentProblem where the disk refuses.
    """
    headers = {
        name: safetensors_header((one.key, dtype, one.shape) for one in tensors)
        for name, tensors in files.items()
    }
    writers.on_first(lambda: _make_files(folder, files, headers, dtype))
    parts: list[FolderPart] = []
    for name, tensors in files.items():
        start = len(headers[name])
        for tensor in tensors:
            parts.append(_part(model, tensor, folder / name, start, dtype))
            start += tensor.numel * dtype.itemsize
    writers.write(parts)
    writers.on_first(lambda: _flush(folder, files))


def _make_files(
    folder: Path, files: Files, headers: Mapping[str, bytes], dtype: torch.dtype
) -> None:
    """Make files of their whole size, of which nothing but the header is written."""
    with disk_errors(f"to write into {folder}"):
        for name, tensors in files.items():
            with (folder / name).open("xb") as stream:
                stream.write(headers[name])
                size = sum(tensor.numel for tensor in tensors) * dtype.itemsize
                stream.truncate(len(headers[name]) + size)


def _part(
    model: StoredModel, tensor: FolderTensor, file: Path, start: int, dtype: torch.dtype
) -> FolderPart:
    num_bytes = tensor.numel * dtype.itemsize

    def write(room: TensorRoom) -> None:
        with room.hold(num_bytes):
            data = tensor_bytes(filled(model, tensor, dtype))
            with disk_errors(f"to write into {file.parent}"), file.open("r+b", 0) as stream:
                _write_all(stream.fileno(), data, start)

    return FolderPart(
        name=tensor.key, file=file.name, num_bytes=num_bytes, largest=num_bytes, write=write
    )


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


def _flush(folder: Path, files: Files) -> None:
    """Wait until the disk has what all ranks wrote: the first one asks for all of it."""
    with disk_errors(f"to write into {folder}"):
        for name in files:
            with (folder / name).open("rb") as stream:
                flush_file(stream.fileno())
