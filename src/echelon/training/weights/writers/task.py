# SPDX-License-Identifier: Apache-2.0
"""The request to export weights, and how one rank or several do it.

Files of Hugging Face are filled in any order: the place of each tensor is known before any is made.
So files are made with their headers first, and ranks and threads fill them: the bytes are those
that one rank would write.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from echelon.config.files.new_file import holding
from echelon.config.model.architectures.common import OWN_TYPE
from echelon.core.disk import disk_errors, flush_file
from echelon.core.errors import ConfigError, Interrupted
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import base_shape
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import DType
from echelon.core.rulebook.config import BAD_ARGUMENT
from echelon.core.rulebook.launch import RUN_INTERRUPTED
from echelon.core.serialize import from_json
from echelon.interop.hugging_face.adapters import ADAPTER_WEIGHTS, adapter_tensors
from echelon.interop.hugging_face.folder import (
    INDEX_NAME,
    SINGLE_NAME,
    FolderTensor,
    folder_tensors,
    hub_config,
    index_text,
    own_config,
    own_tensors,
    share_out,
)
from echelon.launch.context import RankContext
from echelon.launch.environment import known_node_size
from echelon.models.precision import TORCH_DTYPES
from echelon.training.checkpoint.index import CheckpointIndex, read_index
from echelon.training.checkpoint.load import check_checkpoint
from echelon.training.checkpoint.shard_file import safetensors_header, tensor_bytes
from echelon.training.weights.export import StoredModel, filled, open_model
from echelon.training.weights.writers.formats import (
    TrainerFormat,
    TrainerRequest,
    num_parts,
    planned,
    write_text,
    write_trainer,
)
from echelon.training.weights.writers.shares import FolderPart, TensorRoom, Writers

WeightFormat: TypeAlias = Literal["hf", "echelon"] | TrainerFormat
FILE_FORMATS: Final = ("hf", "echelon")
"""Formats of safetensors files with an index and a config.json; the names of tensors differ."""

WRITE_RANK = "echelon.training.weights.writers.task:write_rank"
_POLL_S = 20.0
"""Seconds for which a rank waits for another before it asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTask:
    """Say what is written, and where."""

    checkpoint: str
    """The folder of the checkpoint that is read."""
    folder: str
    """The folder that is written into."""
    to: WeightFormat
    """Whose folder it is."""
    shape: ModelShape
    """The model, with its adapters."""
    dtype: DType
    """The dtype of the tensors."""
    model_type: str | None
    """What transformers calls the architecture; None for the first that says the model."""
    file_bytes: int
    """The most bytes of a safetensors file."""
    threads: int | None
    """Threads of each rank; None for one on each core, shared out among ranks of a machine."""
    tp: int
    """Tensor ranks of megatron-legacy."""
    pp: int
    """Stages of megatron-legacy."""
    adapters: bool
    """Whether the adapters alone are written."""
    sizes: PieceSizes = TRAINING_PIECES
    """Sizes of the pieces in which tensors are read and adapters merged."""

    @property
    def scale(self) -> float:
        """Return what adapters are merged by; 0 where there are none, or they alone are written."""
        return 0.0 if self.shape.lora is None or self.adapters else self.shape.lora.scale

    @property
    def request(self) -> TrainerRequest:
        """Return what is asked of a trainer's format."""
        assert self.to not in FILE_FORMATS, "it is a trainer's"
        return TrainerRequest(
            to=self.to,
            shape=base_shape(self.shape),
            scale=self.scale,
            dtype=self.dtype,
            model_type=self.model_type,
            tp=self.tp,
            pp=self.pp,
            sizes=self.sizes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """The names of the tensors, their number and bytes, safetensors files, and optimizer state."""

    names: str
    tensors: int
    num_bytes: int
    files: tuple[str, ...]
    optimizer: bool = False


def require_ranks(task: ExportTask, ranks: int) -> None:
    """Raise ConfigError where a folder has not as many parts as ranks that are to write it.

    And where it cannot be written at all: before any of them starts.
    """
    index = read_index(Path(task.checkpoint))
    if task.to in FILE_FORMATS:
        count = len(_file_tensors(task)[1])
    else:
        count = num_parts(task.request, planned(task.request, index))
    if ranks > count:
        told = "stages (--pp)" if task.to == "megatron-legacy" else "parts that a rank can write"
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"--ranks is {ranks}, and a folder of {task.to} has {count} {told} here",
                key="--ranks",
                suggestions=[f"--ranks {one}" for one in dict.fromkeys((count, 1))],
            )
        )


def write_weights(task: ExportTask, writers: Writers) -> WrittenWeights:
    """Write weights; all ranks call it.

    ConfigError where no architecture says the model or a trainer has no names for it,
    CheckpointError, and EnvironmentProblem where the disk refuses.
    """
    checkpoint = Path(task.checkpoint)
    index = check_checkpoint(checkpoint, writers.exchange, writers.begin)
    if task.to in FILE_FORMATS:
        return _write_files(task, checkpoint, index, writers)
    found = planned(task.request, index)
    write_trainer(task.request, found, checkpoint, index, Path(task.folder), writers)
    elements = sum(tensor.numel for tensor in found.tensors) * len(found.kinds)
    return WrittenWeights(
        names=found.names,
        tensors=len(found.tensors),
        num_bytes=elements * task.request.torch_dtype.itemsize,
        files=(),
        optimizer=len(found.kinds) > 1,
    )


def write_config(task: ExportTask, additional: Mapping[str, object]) -> None:
    """Write the config.json of a folder of files, with additional keys; none for a trainer."""
    if task.to not in FILE_FORMATS:
        return
    base = base_shape(task.shape)
    own = task.to == "echelon"
    shape_keys = own_config(base) if own else hub_config(base, task.model_type).keys
    dtype = str(TORCH_DTYPES[task.dtype]).removeprefix("torch.")
    keys = {**shape_keys, "torch_dtype": dtype, **additional}
    write_text(
        Path(task.folder) / "config.json", json.dumps(dict(sorted(keys.items())), indent=2) + "\n"
    )


def _file_tensors(task: ExportTask) -> tuple[str, tuple[FolderTensor, ...]]:
    base = base_shape(task.shape)
    if task.to == "echelon":
        return OWN_TYPE, own_tensors(base)
    config = hub_config(base, task.model_type)
    if task.adapters:
        return config.model_type, tuple(adapter_tensors(task.shape, config.architecture))
    return config.model_type, folder_tensors(base, config.architecture)


def _write_files(
    task: ExportTask, checkpoint: Path, index: CheckpointIndex, writers: Writers
) -> WrittenWeights:
    names, tensors = _file_tensors(task)
    dtype, folder = TORCH_DTYPES[task.dtype], Path(task.folder)
    files: Files = {ADAPTER_WEIGHTS: tensors}
    if not task.adapters:
        files = share_out(tensors, dtype.itemsize, task.file_bytes)
    model = open_model(checkpoint, index, tensors, scale=task.scale, sizes=task.sizes)
    write_files(model, files, folder, dtype, writers)
    if not task.adapters and list(files) != [SINGLE_NAME]:
        text = index_text(files, dtype.itemsize)
        writers.on_first(lambda: write_text(folder / INDEX_NAME, text))
    return WrittenWeights(
        names=names,
        tensors=len(tensors),
        num_bytes=sum(tensor.numel for tensor in tensors) * dtype.itemsize,
        files=tuple(files),
    )


class WritersExchange:
    """Tell other ranks small things through the store of a job: with no time limit of its own.

    One rank may write for hours while another waits; whether it lives, the launcher watches.
    """

    def __init__(self, context: RankContext) -> None:
        self.index, self.size = context.rank, context.world_size
        self._context, self._turns = context, count()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, in rank order, on every rank, once all have called."""
        turn = next(self._turns)
        keys = [f"weights/{turn}/{rank}" for rank in range(self.size)]
        self._context.store.set(keys[self.index], pickle.dumps(value).hex())
        return [pickle.loads(bytes.fromhex(self._wait(key).decode("ascii"))) for key in keys]

    def _wait(self, key: str) -> bytes:
        store = self._context.store
        with self._context.progress.waits_for("other ranks that write"):
            while True:
                try:
                    store.wait([key], timedelta(seconds=_POLL_S))
                except RuntimeError as error:
                    if "imeout" not in str(error):
                        raise
                else:
                    return store.get(key)


def write_rank(context: RankContext, argument: Mapping[str, Any]) -> WrittenWeights:
    """Write this rank's share of a folder that is there."""
    task = from_json(ExportTask, argument)
    with holding(Path(task.folder)):
        return write_weights(task, writers_of(context, task.threads))


def writers_of(context: RankContext, threads: int | None) -> Writers:
    """Return the ranks of a job as writers, which move with each tensor and stop when asked to."""
    progress = context.progress

    def begin() -> None:
        if context.stop_requested():
            raise Interrupted(
                RUN_INTERRUPTED.problem("interrupted before all weights were written; none is left")
            )
        progress.mark(progress.doing)

    return Writers(
        threads,
        WritersExchange(context),
        progress.mark,
        begin=begin,
        ranks_here=known_node_size() or context.world_size,
    )


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
