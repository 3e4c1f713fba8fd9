"""Write the weights of a checkpoint as safetensors files of Hugging Face, a tensor at a time.

A tensor of the folder is allocated, filled from the pieces of the checkpoint that lie in it through
one small buffer, converted on the way, and written. So whoever writes holds one tensor and a buffer
of `BUFFER_BYTES`, whatever the layout of the run that made the checkpoint. Files do not depend on
one another, and are written by several threads, each of which holds a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from echelon.core.choices.lora import LORA_A, LORA_B
from echelon.core.disk import disk_errors, flush_file
from echelon.core.errors import CheckpointError
from echelon.core.rulebook.checkpoint import (
    CHECKPOINT_COVERS_TENSORS,
    CHECKPOINT_SAME_MODEL,
    CHECKPOINT_UNDAMAGED,
)
from echelon.interop.hugging_face.folder import FolderTensor
from echelon.interop.weight_names.source import ParameterSource
from echelon.training.checkpoint.index import (
    PARAMETERS,
    CheckpointIndex,
    ShardEntry,
    TensorEntry,
)
from echelon.training.checkpoint.shard_file import (
    DTYPE_NAMES,
    safetensors_header,
    tensor_bytes,
)
from echelon.training.checkpoint.sub_tensor import (
    StoredPiece,
    StoredRows,
    read_pieces,
    row_buffer,
)
from echelon.training.expert_state import ROUTER_BIAS

_STORED = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """Hold where a checkpoint keeps each parameter, and the biases of routers."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    pieces: Mapping[str, Mapping[str, StoredPiece]]
    scale: float = 0.0
    """What the product of the matrices of an adapter is scaled by; 0 where none is merged."""


def open_model(
    path: Path,
    index: CheckpointIndex,
    tensors: Sequence[FolderTensor],
    kind: str = PARAMETERS,
    *,
    scale: float = 0.0,
) -> StoredModel:
    """Return where a checkpoint keeps the parts of some tensors; CheckpointError for one without.

    They are of the model, or of another `kind` with the same names: what an optimizer keeps. Where
    there is a `scale`, adapters of layers are merged into their weights by it. Headers are read,
    and no tensor.
    """
    held = {**index.tensors.get(ROUTER_BIAS, {}), **index.tensors.get(kind, {})}
    wanted = [name for tensor in tensors for name, _ in tensor.parts]
    wanted += [name for one in wanted for name in _adapter_names(one) if scale and name in held]
    lacking = [name for name in wanted if name not in held]
    if lacking:
        raise CheckpointError(
            CHECKPOINT_SAME_MODEL.problem(
                f"{path} is of another model: it lacks {', '.join(lacking[:4])}"
            )
        )
    for name in wanted:
        entry = held[name]
        size = sum(prod(piece.shape) for piece in entry.pieces)
        if size != prod(entry.shape):
            raise CheckpointError(
                CHECKPOINT_COVERS_TENSORS.problem(
                    f"{path} holds {size} elements of {name}, which has {prod(entry.shape)}"
                )
            )
    files = dict.fromkeys(piece.file for name in wanted for piece in held[name].pieces)
    pieces: dict[str, Mapping[str, StoredPiece]] = {}
    for file in files:
        try:
            pieces[file] = read_pieces(path / file)
        except (OSError, ValueError) as error:
            raise _unreadable(path / file, error) from error
    return StoredModel(path=path, tensors=held, pieces=pieces, scale=scale)


def _adapter_names(name: str) -> tuple[str, str]:
    """Return the names of the matrices of an adapter of a layer with this weight."""
    layer = name.removesuffix(".weight")
    return f"{layer}.{LORA_A}.weight", f"{layer}.{LORA_B}.weight"


def write_files(
    model: StoredModel,
    files: Mapping[str, Sequence[FolderTensor]],
    folder: Path,
    dtype: torch.dtype,
    threads: int,
) -> None:
    """Write each file into `folder`, `threads` of them at a time.

    CheckpointError where the checkpoint can't be read, EnvironmentProblem where the disk refuses.
    """
    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        work = [
            pool.submit(_write_file, model, group, folder / name, dtype)
            for name, group in files.items()
        ]
        for one in work:
            one.result()


@torch.no_grad()
def _write_file(
    model: StoredModel, tensors: Sequence[FolderTensor], file: Path, dtype: torch.dtype
) -> None:
    with disk_errors(f"to write into {file.parent}"), file.open("xb") as stream:
        stream.write(safetensors_header((one.key, dtype, one.shape) for one in tensors))
        for tensor in tensors:
            stream.write(tensor_bytes(filled(model, tensor, dtype)))
        stream.flush()
        flush_file(stream.fileno())


def filled(model: StoredModel, tensor: FolderTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the folder, whole; what is padding is zero.

    What adapters add is added before it is rounded.
    """
    padded = any(source.padded for _, source in tensor.parts)
    adapted = [part for part in tensor.parts if _is_adapted(model, part[0])]
    wide = torch.promote_types(dtype, torch.float32) if adapted else dtype
    made = (torch.zeros if padded else torch.empty)(tensor.shape, dtype=wide)
    buffer: torch.Tensor | None = None
    for name, source in tensor.parts:
        entry = model.tensors[name]
        for piece in entry.pieces:
            stored = model.pieces[piece.file].get(piece.key)
            file = model.path / piece.file
            if stored is None or stored.shape != piece.shape:
                raise _unreadable(file, KeyError(piece.key))
            try:
                with file.open("rb", buffering=0) as stream:
                    for rows in _reads(made, source, piece, stored, _STORED[entry.dtype]):
                        buffer = row_buffer(rows, buffer)
                        for part, block in rows.blocks(stream.fileno(), buffer):
                            part.copy_(block - source.offset if source.offset else block)
            except OSError as error:
                raise _unreadable(file, error) from error
    for name, source in adapted:
        _add_adapter(model, made, name, source)
    return made.to(dtype)


def _is_adapted(model: StoredModel, name: str) -> bool:
    return model.scale != 0.0 and all(one in model.tensors for one in _adapter_names(name))


def _add_adapter(
    model: StoredModel, made: torch.Tensor, name: str, source: ParameterSource
) -> None:
    """Add s B A to the part of a tensor that is the weight of a layer."""
    a_RI, b_OR = (_whole(model, one, made.dtype) for one in _adapter_names(name))
    added_OI = (b_OR @ a_RI).mul_(model.scale)
    if source.transposed:
        made[:, source.start : source.start + len(added_OI)] += added_OI.t()
        return
    rows_of_made = made.view(-1, made.shape[-1])
    for run in source.runs(0, len(added_OI)):
        end = run.there + (run.count - 1) * run.step + 1
        rows_of_made[run.there : end : run.step] += added_OI[run.here : run.here + run.count]


def _whole(model: StoredModel, name: str, dtype: torch.dtype) -> torch.Tensor:
    shape = model.tensors[name].shape
    part = name, ParameterSource(key=name, shape=shape)
    return filled(model, FolderTensor(key=name, shape=shape, parts=(part,)), dtype)


def _reads(
    made: torch.Tensor,
    source: ParameterSource,
    piece: ShardEntry,
    stored: StoredPiece,
    dtype: torch.dtype,
) -> Iterator[StoredRows]:
    """Yield what to read of a piece of a parameter, with the part of `made` that it fills."""
    flat = len(piece.shape) == 1
    # Of a tensor of one dim each element is a row.
    top, left = (piece.offset[0], 0) if flat else piece.offset
    height, width = (piece.shape[0], 1) if flat else piece.shape
    if source.transposed:
        begin, first = source.start + top * source.step, source.row + left
        end = begin + (height - 1) * source.step + 1
        columns = made.view(-1, made.shape[-1])[first : first + width, begin : end : source.step]
        yield _rows(stored, dtype, 0, width, columns.t())
        return
    rows_of_made = made.unsqueeze(1) if made.dim() == 1 else made.view(-1, made.shape[-1])
    for run in source.runs(top, height):
        end = run.there + (run.count - 1) * run.step + 1
        target = rows_of_made[run.there : end : run.step, left : left + width]
        yield _rows(stored, dtype, run.here - top, width, target)


def _rows(
    stored: StoredPiece, dtype: torch.dtype, row: int, width: int, target: torch.Tensor
) -> StoredRows:
    return StoredRows(
        start=stored.start, dtype=dtype, width=width, row=row, column=0, target=target
    )


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(CHECKPOINT_UNDAMAGED.problem(f"{file} cannot be read: {error}"))
