# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint into any layout: each rank reads the rectangles that it holds, from any file.

Everything is checked before the first tensor is touched, and every rank raises what any rank
found. Ranks share out the checksums, so each byte is hashed once however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.core.disk import list_names, sha256_of_file
from echelon.core.errors import CheckpointError, Problem
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.rulebook.run import (
    CHECKPOINT_COMPLETE,
    CHECKPOINT_COVERS_TENSORS,
    CHECKPOINT_SAME_MODEL,
    CHECKPOINT_UNDAMAGED,
)
from echelon.training.checkpoint.communicator import (
    ObjectCommunicator,
    SingleRankCommunicator,
    run_on_all_ranks,
)
from echelon.training.checkpoint.folder import other_checkpoints
from echelon.training.checkpoint.identity import RunIdentity, identity_problems, shown
from echelon.training.checkpoint.index import CheckpointIndex, Rectangle, read_index, read_state
from echelon.training.checkpoint.shard_file import (
    DTYPE_NAMES,
    Shards,
    every_shard,
    read_pieces,
    row_buffer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """Hold what a checkpoint says besides its tensors."""

    step: int
    state: Mapping[str, Any]


_ShardRead = tuple[str, tuple[slice, ...], torch.Tensor]
"""One copy to do: which piece, what is cut out of it, and the part of a shard that it fills."""


def load_checkpoint(
    path: Path,
    *,
    wanted: Shards,
    identity: RunIdentity,
    exchange: ObjectCommunicator,
    accept: Collection[str] = (),
    pieces: PieceSizes = TRAINING_PIECES,
) -> LoadedCheckpoint:
    """Fill the tensors of `wanted` in place from the checkpoint folder `path`; every rank calls it.

    `wanted` may be cut in any way (other degrees, other stages, one rank, parameters only); all of
    its shards are filled, primary or not. `accept` lists entries of the mathematics that may
    differ, such as ``optimizer.total_steps``. CheckpointError names all that is wrong, on every
    rank, and leaves the tensors as they were.
    """
    prepared: list[tuple[CheckpointIndex, dict[str, list[_ShardRead]]]] = []
    # Kept here, not taken from what is gathered: what has crossed processes is a copy, and the
    # tensors to fill must be this rank's own.
    run_on_all_ranks(exchange, lambda: prepared.append(_prepare(path, wanted, identity, accept)))
    index, reads = prepared[0]
    run_on_all_ranks(exchange, lambda: _verify_share(path, index, exchange))
    run_on_all_ranks(exchange, lambda: _read_all(path, reads, pieces))
    return LoadedCheckpoint(step=index.step, state=read_state(path))


def check_checkpoint(
    path: Path,
    exchange: ObjectCommunicator | None = None,
    begin: Callable[[], None] = lambda: None,
) -> CheckpointIndex:
    """Return the index of the checkpoint at `path` once every file in it has its checksum.

    With an `exchange` every rank calls it, and checks some of the files; `begin` is called before
    each.
    """
    ranks = exchange or SingleRankCommunicator()
    index = read_index(path)
    problems = list(file_problems(path, index))
    if problems:
        raise CheckpointError(problems)
    run_on_all_ranks(ranks, lambda: _verify_share(path, index, ranks, begin))
    return index


def _prepare(
    path: Path, wanted: Shards, identity: RunIdentity, accept: Collection[str]
) -> tuple[CheckpointIndex, dict[str, list[_ShardRead]]]:
    index = read_index(path)
    problems = [
        *file_problems(path, index),
        *identity_problems(index, identity, where=str(path), accept=accept),
    ]
    if not problems:
        problems.extend(_tensor_problems(path, index, wanted))
    if problems:
        raise CheckpointError(problems)
    return index, _plan_reads(path, index, wanted)


def file_problems(path: Path, index: CheckpointIndex) -> Iterator[Problem]:
    """Yield a problem for each file that is missing or has another size than it was given."""
    for name, entry in index.files.items():
        file = path / name
        if not file.is_file():
            yield CHECKPOINT_COMPLETE.problem(
                f"{file} is missing: {list_names(path)}", suggestions=other_checkpoints(path)
            )
        elif file.stat().st_size != entry.size_bytes:
            yield CHECKPOINT_UNDAMAGED.problem(
                f"{file} has {file.stat().st_size} bytes of {entry.size_bytes}",
                suggestions=other_checkpoints(path),
            )


def _verify_share(
    path: Path,
    index: CheckpointIndex,
    exchange: ObjectCommunicator,
    begin: Callable[[], None] = lambda: None,
) -> None:
    problems: list[Problem] = []
    for name in sorted(index.files)[exchange.index :: exchange.size]:
        begin()
        try:
            found = sha256_of_file(path / name)
        except OSError as error:
            found = f"unreadable ({error.strerror})"
        if found != index.files[name].sha256:
            problems.append(
                CHECKPOINT_UNDAMAGED.problem(
                    f"{path / name} is damaged: its checksum was {index.files[name].sha256[:12]}..."
                    f" when it was written, and is {found[:12]}...",
                    suggestions=other_checkpoints(path),
                )
            )
    if problems:
        raise CheckpointError(problems)


def _tensor_problems(path: Path, index: CheckpointIndex, wanted: Shards) -> Iterator[Problem]:
    differences: dict[str, None] = {}
    for kind, name, shard in every_shard(wanted):
        entry = index.tensors.get(kind, {}).get(name)
        dtype = DTYPE_NAMES[shard.tensor.dtype]
        if entry is None:
            differences[f"{kind}/{name} is not in it"] = None
        elif entry.shape != tuple(shard.global_shape):
            differences[
                f"{kind}/{name} is {list(entry.shape)} in it, {list(shard.global_shape)} here"
            ] = None
        elif entry.dtype != dtype:
            differences[f"{kind}/{name} is {entry.dtype} in it, {dtype} here"] = None
    if differences:
        yield CHECKPOINT_SAME_MODEL.problem(
            f"{path} is of another model: {shown(list(differences))}"
        )


def _plan_reads(path: Path, index: CheckpointIndex, wanted: Shards) -> dict[str, list[_ShardRead]]:
    reads: dict[str, list[_ShardRead]] = {}
    holes: list[str] = []
    for kind, name, shard in every_shard(wanted):
        place = Rectangle(tuple(shard.offset), tuple(shard.tensor.shape))
        found = 0
        for piece in index.tensors[kind][name].pieces:
            source = Rectangle(piece.offset, piece.shape)
            common = place.intersection(source)
            if common is None:
                continue
            found += common.numel
            target = shard.tensor.detach()[common.slices_within(place)]
            reads.setdefault(piece.file, []).append(
                (piece.key, common.slices_within(source), target)
            )
        if found != place.numel:
            holes.append(f"{kind}/{name} from {list(place.offset)}: {found} of {place.numel}")
    if holes:
        raise CheckpointError(
            CHECKPOINT_COVERS_TENSORS.problem(
                f"{path} does not hold all elements that were asked for: {shown(holes)}"
            )
        )
    return reads


def _read_all(path: Path, reads: Mapping[str, Sequence[_ShardRead]], sizes: PieceSizes) -> None:
    buffer: torch.Tensor | None = None
    for name, entries in reads.items():
        try:
            pieces = read_pieces(path / name)
            with (path / name).open("rb", buffering=0) as stream:
                for key, cut, target in entries:
                    for rows in pieces[key].rows(cut, target):
                        buffer = row_buffer(rows, buffer, sizes)
                        for part, block in rows.blocks(stream.fileno(), buffer):
                            part.copy_(block)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                CHECKPOINT_UNDAMAGED.problem(
                    f"{path / name} cannot be read: {error}", suggestions=other_checkpoints(path)
                )
            ) from error
