# SPDX-License-Identifier: Apache-2.0
"""Fill a rank's shards from files of weights, a few megabytes at a time (`shard_file.py`).

Values are converted on the way, so a rank never holds more than its shards and one small buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from echelon.core.errors import CheckpointError
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.rulebook.weights import WEIGHTS_FILE_READABLE, WEIGHTS_FINITE
from echelon.interop.weight_names.source import RowRun
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator, run_on_all_ranks
from echelon.training.checkpoint.shard_file import DTYPE_NAMES, StoredRows, row_buffer
from echelon.training.weights.files import SETTING, WeightFiles
from echelon.training.weights.stored import StoredBlock

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightRead:
    """Say which rows and columns of a block go where."""

    name: str
    """The parameter."""
    dtype: torch.dtype
    """What is stored."""
    block: StoredBlock
    """Where it lies."""
    row: int
    """The first row, counted in the block."""
    column: int
    """The first column, counted in the block."""
    target: torch.Tensor
    """What is filled, [rows, columns]."""
    step: int = 1
    """Rows are each so many-th one."""
    column_step: int = 1
    """And so are columns."""
    offset: float = 0.0
    """How much more values get than is stored."""

    @property
    def rows(self) -> StoredRows:
        """Return what to read of the file."""
        return StoredRows(
            start=self.block.start,
            dtype=self.dtype,
            width=self.block.width,
            row=self.row,
            column=self.column,
            target=self.target,
            step=self.step,
            column_step=self.column_step,
        )


def load_moments(
    weights: WeightFiles,
    wanted: Mapping[str, Mapping[str, Sequence[Shard]]],
    exchange: ObjectCommunicator,
    pieces: PieceSizes = TRAINING_PIECES,
) -> None:
    """Fill what an optimizer keeps, by kind, then by canonical name; every rank calls it."""
    for kind, shards in wanted.items():
        # What files keep less of a value is no part of what its gradients add up to.
        places = {
            name: (stored, replace(source, offset=0.0))
            for name, (stored, source) in weights.moments[kind].items()
        }
        load_weights(replace(weights, sources=places), shards, exchange, pieces)


def load_weights(
    weights: WeightFiles,
    wanted: Mapping[str, Sequence[Shard]],
    exchange: ObjectCommunicator,
    pieces: PieceSizes = TRAINING_PIECES,
) -> None:
    """Fill the tensors of `wanted` (by canonical name) in place; every rank calls it.

    Values become the dtype of their target. CheckpointError, on every rank, where a file cannot be
    read on some rank or a value is not finite in its target's dtype.
    """
    run_on_all_ranks(exchange, lambda: _load(weights, wanted, pieces))


@torch.no_grad()
def _load(weights: WeightFiles, wanted: Mapping[str, Sequence[Shard]], pieces: PieceSizes) -> None:
    reads = [
        read
        for shards in wanted.values()
        for shard in shards
        if shard.tensor.numel()
        for read in _plan_reads(weights, shard)
    ]
    reads.sort(key=lambda read: (read.block.file, read.block.start, read.row, read.column))
    buffer: torch.Tensor | None = None
    spoilt: dict[str, None] = {}
    for file, of_file in groupby(reads, key=lambda read: read.block.file):
        try:
            with file.open("rb", buffering=0) as stream:
                for read in of_file:
                    buffer = row_buffer(read.rows, buffer, pieces)
                    if not _fill(stream.fileno(), read, buffer):
                        spoilt[read.name] = None
        except OSError as error:
            reason = f"{file} cannot be read: {error.strerror or error}"
            raise CheckpointError(WEIGHTS_FILE_READABLE.problem(reason, key=SETTING)) from error
    if spoilt:
        raise CheckpointError(
            WEIGHTS_FINITE.problem(
                f"{weights.path} has values that are not finite here: {', '.join(spoilt)}",
                key=SETTING,
            )
        )


def _plan_reads(weights: WeightFiles, shard: Shard) -> Iterator[_WeightRead]:
    source = weights.sources[shard.name][1]
    target, offset = shard.tensor.detach(), shard.offset
    if target.dim() == 1:
        # Of a tensor of one dim each element is a row.
        target, offset = target.unsqueeze(1), (offset[0], 0)
    if source.transposed:
        run = RowRun(here=0, count=target.shape[1], there=source.row + offset[1], step=1)
        column = source.start + offset[0] * source.step
        yield from _meet(shard.name, weights, run, target.t(), column)
        return
    for run in source.runs(offset[0], target.shape[0]):
        begin = run.here - offset[0]
        yield from _meet(shard.name, weights, run, target[begin : begin + run.count], offset[1])


def _meet(
    name: str, weights: WeightFiles, run: RowRun, target: torch.Tensor, column: int
) -> Iterator[_WeightRead]:
    """Yield what to read of each block for rows of a parameter, from `column` on."""
    stored, source = weights.sources[name]
    step = source.step if source.transposed else 1
    for block in stored.blocks:
        # The first and the last of these rows that are in the block.
        first = max(0, -(-(block.row - run.there) // run.step))
        end = min(run.count, (block.row + block.height - 1 - run.there) // run.step + 1)
        # And so of the columns.
        left = max(0, -(-(block.column - column) // step))
        right = min(target.shape[1], (block.column + block.width - 1 - column) // step + 1)
        if first < end and left < right:
            yield _WeightRead(
                name=name,
                dtype=TORCH_DTYPES[stored.dtype],
                block=block,
                row=run.there + first * run.step - block.row,
                column=column + left * step - block.column,
                target=target[first:end, left:right],
                step=run.step,
                column_step=step,
                offset=source.offset,
            )


def _fill(descriptor: int, read: _WeightRead, buffer: torch.Tensor) -> bool:
    """Read what a shard needs; return whether all of it is finite there."""
    finite = True
    for part, block in read.rows.blocks(descriptor, buffer):
        part.copy_(block)
        if read.offset:
            part.add_(read.offset)
        finite = finite and bool(torch.isfinite(part).all())
    return finite
