"""Fill a rank's shards from files of weights, a few megabytes at a time.

Only rows that a shard needs are read, into one small buffer and from there, converted, into the
shard; so a rank never holds more than its shards and that buffer. (A mapped file would do with less
code, but its pages count as memory of the process, all of them in the end.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from echelon.core.errors import CheckpointError
from echelon.core.offload_file import read_all
from echelon.core.rulebook.weights import WEIGHTS_FILE_READABLE, WEIGHTS_FINITE
from echelon.parallel.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator, run_on_all_ranks
from echelon.training.checkpoint.shard_file import DTYPE_NAMES
from echelon.training.weights.files import DTYPE_SIZES, SETTING, StoredTensor, WeightFiles

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_BUFFER_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightRead:
    """Say which rows and columns of a stored matrix go where; `target` is [rows, columns].

    They are each `step`-th row from `row` on; of a tensor of three dims, all rows are one matrix.
    """

    name: str
    stored: StoredTensor
    row: int
    column: int
    target: torch.Tensor
    step: int = 1

    @property
    def width(self) -> int:
        """Return the columns of the stored matrix."""
        return self.stored.shape[-1]


def load_weights(
    weights: WeightFiles, wanted: Mapping[str, Sequence[Shard]], exchange: ObjectCommunicator
) -> None:
    """Fill the tensors of `wanted` (by canonical name) in place; every rank calls it.

    Values become the dtype of their target. CheckpointError, on every rank, where a file cannot be
    read on some rank or a value is not finite in its target's dtype.
    """
    run_on_all_ranks(exchange, lambda: _load(weights, wanted))


@torch.no_grad()
def _load(weights: WeightFiles, wanted: Mapping[str, Sequence[Shard]]) -> None:
    reads = [
        read
        for shards in wanted.values()
        for shard in shards
        if shard.tensor.numel()
        for read in _plan_reads(weights, shard)
    ]
    reads.sort(key=lambda read: (read.stored.file, read.stored.start, read.row, read.column))
    buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
    spoilt: dict[str, None] = {}
    for file, of_file in groupby(reads, key=lambda read: read.stored.file):
        try:
            with file.open("rb", buffering=0) as stream:
                for read in of_file:
                    row_bytes = read.width * DTYPE_SIZES[read.stored.dtype]
                    if buffer.numel() < row_bytes:
                        buffer = torch.empty(row_bytes, dtype=torch.uint8)
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
    stored, source = weights.sources[shard.name]
    target, offset = shard.tensor.detach(), shard.offset
    if target.dim() == 1 or source.transposed:
        row = offset[1] if source.transposed and target.dim() == 2 else 0
        yield _WeightRead(
            name=shard.name,
            stored=stored,
            row=row,
            column=offset[0] + source.start,
            target=target.unsqueeze(0) if target.dim() == 1 else target.t(),
        )
        return
    for run in source.runs(offset[0], target.shape[0]):
        begin = run.here - offset[0]
        yield _WeightRead(
            name=shard.name,
            stored=stored,
            row=run.there,
            column=offset[1],
            target=target[begin : begin + run.count],
            step=run.step,
        )


def _fill(descriptor: int, read: _WeightRead, buffer: torch.Tensor) -> bool:
    """Read what a shard needs; return whether all of it is finite there."""
    finite = True
    for part, block in _blocks(descriptor, read, buffer):
        part.copy_(block)
        finite = finite and bool(torch.isfinite(part).all())
    return finite


def _blocks(
    descriptor: int, read: _WeightRead, buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield some rows of the target at a time, with their values as they are in the file."""
    num_rows, num_columns = read.target.shape
    # Of a single row only the columns are read that are asked for, of several all of each.
    begin, width = (read.column, num_columns) if num_rows == 1 else (0, read.width)
    skip = read.column - begin
    item, dtype = DTYPE_SIZES[read.stored.dtype], TORCH_DTYPES[read.stored.dtype]
    rows_at_once = max(1, buffer.numel() // (width * item * read.step))
    memory = buffer.numpy().data
    for first in range(0, num_rows, rows_at_once):
        part = read.target[first : first + rows_at_once]
        # What lies between two rows is read with them, and left out.
        size = ((part.shape[0] - 1) * read.step + 1) * width * item
        position = ((read.row + first * read.step) * read.width + begin) * item
        read_all(descriptor, memory[:size], read.stored.start + position)
        block = buffer[:size].view(dtype).view(-1, width)[:: read.step]
        yield part, block[:, skip : skip + num_columns]
