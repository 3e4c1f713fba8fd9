# SPDX-License-Identifier: Apache-2.0
"""What is asked for when weights leave, and how one rank or several do it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from echelon.config.model.config_json import OWN_TYPE
from echelon.core.errors import ConfigError
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import base_shape
from echelon.core.plan import DType
from echelon.core.rulebook.config import BAD_ARGUMENT
from echelon.interop.hugging_face.adapters import ADAPTER_WEIGHTS, adapter_tensors
from echelon.interop.hugging_face.folder import (
    INDEX_NAME,
    SINGLE_NAME,
    FolderTensor,
    folder_tensors,
    hub_config,
    index_text,
    own_tensors,
    share_out,
)
from echelon.models.precision import TORCH_DTYPES
from echelon.training.checkpoint.index import CheckpointIndex, read_index
from echelon.training.checkpoint.load import check_checkpoint
from echelon.training.weights.export import open_model
from echelon.training.weights.writers.formats import (
    TrainerFormat,
    TrainerRequest,
    num_parts,
    planned,
    write_text,
    write_trainer,
)
from echelon.training.weights.writers.hugging_face import Files, write_files
from echelon.training.weights.writers.shares import Writers

WeightFormat: TypeAlias = Literal["hf", "echelon"] | TrainerFormat
FILE_FORMATS: Final = ("hf", "echelon")
"""Formats of safetensors files with an index and a config.json; the names of tensors differ."""


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
    model = open_model(checkpoint, index, tensors, scale=task.scale)
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
