# SPDX-License-Identifier: Apache-2.0
"""Tensors of a folder, made one at a time from a checkpoint, whatever its layout.

A tensor is allocated, filled from the pieces of the checkpoint that lie in it through one small
buffer, and converted on the way. So its maker holds it and a buffer of `buffer_bytes`; to
merge adapters takes `merged_bytes` more (`core/piece_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from echelon.core.choices.lora import LORA_A, LORA_B
from echelon.core.errors import CheckpointError
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.rulebook.run import (
    CHECKPOINT_COVERS_TENSORS,
    CHECKPOINT_SAME_MODEL,
    CHECKPOINT_UNDAMAGED,
)
from echelon.interop.hugging_face.folder import FolderTensor
from echelon.interop.weight_names.source import ParameterSource
from echelon.training.checkpoint.index import PARAMETERS, CheckpointIndex, ShardEntry, TensorEntry
from echelon.training.checkpoint.shard_file import (
    DTYPE_NAMES,
    StoredPiece,
    StoredRows,
    own_memory,
    read_pieces,
    row_buffer,
)
from echelon.training.steps.expert_balance import ROUTER_BIAS

SCRATCH_BYTES = TRAINING_PIECES.buffer_bytes + TRAINING_PIECES.merged_bytes
"""What it takes to make a tensor, beside the tensor."""
_STORED = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """Hold where a checkpoint keeps each parameter, and the biases of routers."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    pieces: Mapping[str, Mapping[str, StoredPiece]]
    scale: float = 0.0
    """What the product of the matrices of an adapter is scaled by; 0 where none is merged."""
    sizes: PieceSizes = TRAINING_PIECES


def open_model(
    path: Path,
    index: CheckpointIndex,
    tensors: Sequence[FolderTensor],
    kind: str = PARAMETERS,
    *,
    scale: float = 0.0,
    sizes: PieceSizes = TRAINING_PIECES,
) -> StoredModel:
    """Return where a checkpoint keeps the parts of some tensors; CheckpointError for one without.

    They are of the model, or of another `kind` with the same names: what an optimizer keeps. Where
    there is a `scale`, adapters of layers are merged into their weights by it. Large
    tensors are read and merged in pieces of `sizes`. Headers are read, and no tensor.
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
    return StoredModel(path=path, tensors=held, pieces=pieces, scale=scale, sizes=sizes)


def _adapter_names(name: str) -> tuple[str, str]:
    """Return the names of the matrices of an adapter of a layer with this weight."""
    layer = name.removesuffix(".weight")
    return f"{layer}.{LORA_A}.weight", f"{layer}.{LORA_B}.weight"


@torch.no_grad()
def filled(model: StoredModel, tensor: FolderTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the folder, whole; what is padding is zero.

    What adapters add is added before it is rounded.
    """
    made = own_memory(tensor.shape, dtype)
    for name, source in tensor.parts:
        if _is_adapted(model, name):
            _fill_merged(model, made, name, source)
        else:
            _fill(model, name, source.offset, partial(_reads, made, source))
    return made


_Reads = Callable[[ShardEntry, StoredPiece, torch.dtype], Iterator[StoredRows]]


def _fill(model: StoredModel, name: str, offset: float, reads: _Reads) -> None:
    """Read what `reads` says of each piece of a parameter into place, less `offset`."""
    entry = model.tensors[name]
    buffer: torch.Tensor | None = None
    for piece in entry.pieces:
        stored = model.pieces[piece.file].get(piece.key)
        file = model.path / piece.file
        if stored is None or stored.shape != piece.shape:
            raise _unreadable(file, KeyError(piece.key))
        try:
            with file.open("rb", buffering=0) as stream:
                for rows in reads(piece, stored, _STORED[entry.dtype]):
                    buffer = row_buffer(rows, buffer, model.sizes)
                    for part, block in rows.blocks(stream.fileno(), buffer):
                        part.copy_(block - offset if offset else block)
        except OSError as error:
            raise _unreadable(file, error) from error


def _is_adapted(model: StoredModel, name: str) -> bool:
    return model.scale != 0.0 and all(one in model.tensors for one in _adapter_names(name))


def _fill_merged(
    model: StoredModel, made: torch.Tensor, name: str, source: ParameterSource
) -> None:
    """Put W + s B A into the part of a tensor that is the weight W of a layer, some rows at a time.

    Which rows come together depends on nothing but their width: so do the bits of the product.
    """
    wide = torch.promote_types(made.dtype, torch.float32)
    a_RI, b_OR = (_whole(model, one, wide) for one in _adapter_names(name))
    rows, width = model.tensors[name].shape
    at_once = max(1, model.sizes.merged_bytes // (2 * width * wide.itemsize))
    rows_of_made = made.view(-1, made.shape[-1])
    merged, added = (own_memory((min(rows, at_once), width), wide) for _ in range(2))
    for first in range(0, rows, at_once):
        end = min(rows, first + at_once)
        merged_OI, added_OI = merged[: end - first], added[: end - first]
        _fill(model, name, 0.0, partial(_window, first, merged_OI))
        torch.mm(b_OR[first:end], a_RI, out=added_OI)
        merged_OI += added_OI.mul_(model.scale)
        if source.transposed:
            made[:, source.start + first : source.start + end] = merged_OI.t()
            continue
        for run in source.runs(first, end - first):
            last, begin = run.there + (run.count - 1) * run.step + 1, run.here - first
            rows_of_made[run.there : last : run.step] = merged_OI[begin : begin + run.count]


def _window(
    first: int, target: torch.Tensor, piece: ShardEntry, stored: StoredPiece, dtype: torch.dtype
) -> Iterator[StoredRows]:
    """Yield what to read of a piece for rows of a parameter from `first` on, in its own order."""
    (top, left), (height, width) = piece.offset, piece.shape
    begin, end = max(first, top), min(first + len(target), top + height)
    if begin < end:
        part = target[begin - first : end - first, left : left + width]
        yield _rows(stored, dtype, begin - top, width, part)


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
