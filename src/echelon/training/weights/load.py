"""Fill a rank's shards from files of weights, a few megabytes at a time (`sub_tensor.py`).

Values are converted on the way, so a rank never holds more than its shards and one small buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from echelon.core.errors import CheckpointError
from echelon.core.rulebook.weights import WEIGHTS_FILE_READABLE, WEIGHTS_FINITE
from echelon.parallel.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator, run_on_all_ranks
from echelon.training.checkpoint.shard_file import DTYPE_NAMES
from echelon.training.checkpoint.sub_tensor import StoredRows, row_buffer
from echelon.training.weights.files import SETTING, StoredTensor, WeightFiles

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightRead:
    """Say which rows and columns of a stored matrix go where; `target` is [rows, columns].

    They are each `step`-th row from `row` on; of a tensor of three dims, all rows are one matrix.
    A vector whose elements are in another order is a matrix of one column. Values get `offset` more
    than is stored.
    """

    name: str
    stored: StoredTensor
    row: int
    column: int
    target: torch.Tensor
    step: int = 1
    width: int | None = None
    offset: float = 0.0

    @property
    def rows(self) -> StoredRows:
        """Return what to read of the file."""
        return StoredRows(
            start=self.stored.start,
            dtype=TORCH_DTYPES[self.stored.dtype],
            width=self.stored.shape[-1] if self.width is None else self.width,
            row=self.row,
            column=self.column,
            target=self.target,
            step=self.step,
        )


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
    buffer: torch.Tensor | None = None
    spoilt: dict[str, None] = {}
    for file, of_file in groupby(reads, key=lambda read: read.stored.file):
        try:
            with file.open("rb", buffering=0) as stream:
                for read in of_file:
                    buffer = row_buffer(read.rows, buffer)
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
    vector = target.dim() == 1 and source.order is not None
    if not vector and (target.dim() == 1 or source.transposed):
        row = offset[1] if source.transposed and target.dim() == 2 else 0
        yield _WeightRead(
            name=shard.name,
            stored=stored,
            row=row,
            column=offset[0] + source.start,
            target=target.unsqueeze(0) if target.dim() == 1 else target.t(),
            offset=source.offset,
        )
        return
    rows = target.unsqueeze(1) if vector else target
    for run in source.runs(offset[0], target.shape[0]):
        begin = run.here - offset[0]
        yield _WeightRead(
            name=shard.name,
            stored=stored,
            row=run.there,
            column=0 if vector else offset[1],
            target=rows[begin : begin + run.count],
            step=run.step,
            width=1 if vector else None,
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
