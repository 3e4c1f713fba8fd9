# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint so that a kill at any moment leaves only checkpoints that load.

1. rank 0 makes a temporary folder                 2. each rank writes and flushes its own file
3. rank 0 looks at all files, writes the index     4. rank 0 renames the folder: committed
5. only then the oldest ones are renamed away and removed

What never changes is written so once, before the first checkpoint, into a folder beside them all.
What ranks send each other is names, sizes and checksums; tensors go to the disk and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from echelon.core.disk import disk_errors, flush_folder, write_durably
from echelon.core.errors import CheckpointError, EchelonError
from echelon.core.rulebook.run import (
    CHECKPOINT_COVERS_TENSORS,
    CHECKPOINT_SHARED_FOLDER,
    CHECKPOINT_WRITTEN_ONCE,
)
from echelon.core.serialize import to_json
from echelon.core.version import __version__
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator, run_on_all_ranks
from echelon.training.checkpoint.folder import (
    Keep,
    checkpoint_path,
    new_temporary,
    prune,
    remove_unused_base,
)
from echelon.training.checkpoint.identity import RunIdentity, shown
from echelon.training.checkpoint.index import (
    BASE_FOLDER,
    INDEX_FILE,
    STATE_FILE,
    BaseReference,
    CheckpointFileEntry,
    CheckpointIndex,
    Rectangle,
    TensorEntry,
    covering_problem,
    reference_to,
)
from echelon.training.checkpoint.shard_file import (
    Shards,
    WrittenFile,
    WrittenShard,
    write_shard_file,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Hold what one rank puts into a checkpoint.

    `step` counts the optimizer steps done. `state` is everything besides tensors that the next
    step depends on (tokens seen, sampler position, learning rate, ...), as JSON values, the same
    on every rank. Of `shards`, the primary ones are written.

    `base` are the shards that never change in a run: they are written beside its checkpoints,
    unless they are there, which is known by `known_base`.
    """

    step: int
    state: Mapping[str, object]
    shards: Shards
    base: Shards = field(default_factory=dict[str, Mapping[str, Sequence[Shard]]])
    known_base: BaseReference | None = None


def save_checkpoint(
    directory: Path,
    snapshot: Snapshot,
    *,
    identity: RunIdentity,
    exchange: ObjectCommunicator,
    keep: Keep = "all",
) -> Path:
    """Commit `snapshot` to `directory`/step-N, then keep the `keep` newest; every rank calls this.

    Return the path of the committed checkpoint. All ranks raise the same error when any of them
    fails, and what was committed before is untouched: CheckpointError where the step is already
    saved or the shards are not the whole model, EnvironmentProblem where the disk refuses.
    """
    base = _base_beside(directory, snapshot, identity, exchange)
    final = checkpoint_path(directory, snapshot.step)
    _write_folder(final, snapshot, base, identity, exchange)
    _on_chief(exchange, lambda: prune(directory, newest=snapshot.step, keep=keep))
    return final


def _on_chief(exchange: ObjectCommunicator, action: Callable[[], T]) -> T | None:
    """Do something on rank 0, and return on every rank what came of it."""
    return run_on_all_ranks(exchange, lambda: action() if exchange.index == 0 else None)[0]


def _base_beside(
    directory: Path, snapshot: Snapshot, identity: RunIdentity, exchange: ObjectCommunicator
) -> BaseReference | None:
    """Return the base that a checkpoint stands on, which is written where it is not there yet."""
    if not snapshot.base:
        return None
    folder = directory / BASE_FOLDER

    def found() -> BaseReference | None:
        if not folder.exists():
            return None
        reference = reference_to(folder)
        if reference == snapshot.known_base:
            return reference
        # Of a run that ended before its first checkpoint, or that this one did not begin with.
        if remove_unused_base(folder):
            return None
        raise CheckpointError(
            CHECKPOINT_WRITTEN_ONCE.problem(
                f"{folder} is below other checkpoints, has other frozen weights than this run, and "
                "is not overwritten"
            )
        )

    known = _on_chief(exchange, found)
    if known is not None:
        return known
    first = Snapshot(step=0, state={}, shards=snapshot.base)
    _write_folder(folder, first, None, identity, exchange)
    return _on_chief(exchange, lambda: reference_to(folder))


def _write_folder(
    final: Path,
    snapshot: Snapshot,
    base: BaseReference | None,
    identity: RunIdentity,
    exchange: ObjectCommunicator,
) -> None:
    """Write the shards of all ranks into a new folder, and commit it; every rank calls this."""
    temporary = _on_chief(exchange, lambda: _begin(final))
    assert temporary is not None, "rank 0 made the temporary folder or raised"
    file = f"rank-{exchange.index:04d}.safetensors"
    try:
        written = run_on_all_ranks(
            exchange, lambda: write_shard_file(temporary, file, snapshot.shards)
        )
        _on_chief(exchange, lambda: _commit(temporary, final, snapshot, base, identity, written))
    except EchelonError:
        if exchange.index == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(final: Path) -> Path:
    if final.exists():
        raise CheckpointError(
            CHECKPOINT_WRITTEN_ONCE.problem(f"{final} is already there and is not overwritten")
        )
    temporary = new_temporary(final)
    with disk_errors(f"to make a folder in {final.parent}"):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    return temporary


def _commit(
    temporary: Path,
    final: Path,
    snapshot: Snapshot,
    base: BaseReference | None,
    identity: RunIdentity,
    written: Sequence[WrittenFile],
) -> None:
    _require_all_files(temporary, written)
    tensors = _collect_tensors([stored for file in written for stored in file.shards])
    state = (json.dumps({**snapshot.state, "step": snapshot.step}, indent=1) + "\n").encode()
    files = {file.file: file.entry for file in written if file.entry is not None}
    files[STATE_FILE] = CheckpointFileEntry(
        size_bytes=len(state), sha256=hashlib.sha256(state).hexdigest()
    )
    index = CheckpointIndex(
        step=snapshot.step,
        world_size=len(written),
        echelon_version=__version__,
        plan_hash=identity.plan_hash,
        model_hash=identity.model_hash,
        tokenizer_hash=identity.tokenizer_hash,
        mathematics=to_json(identity.mathematics),
        files=files,
        tensors=tensors,
        base=base,
    )
    with disk_errors(f"to commit {final}"):
        write_durably(temporary / STATE_FILE, state)
        write_durably(temporary / INDEX_FILE, index.to_text().encode())
        flush_folder(temporary)
        temporary.rename(final)
        flush_folder(final.parent)


def _require_all_files(temporary: Path, written: Sequence[WrittenFile]) -> None:
    missing: list[str] = []
    for file in written:
        if file.entry is None:
            continue
        path = temporary / file.file
        # One look by name, no listing: a network file system may serve an old listing.
        size = path.stat().st_size if path.exists() else None
        if size != file.entry.size_bytes:
            seen = "nothing" if size is None else f"{size} bytes"
            missing.append(f"{file.file} ({file.entry.size_bytes} bytes written, {seen} seen)")
    if missing:
        raise CheckpointError(
            CHECKPOINT_SHARED_FOLDER.problem(
                f"rank 0 does not see in {temporary} what other ranks wrote: {shown(missing)}"
            )
        )


def _collect_tensors(stored: Sequence[WrittenShard]) -> dict[str, dict[str, TensorEntry]]:
    by_tensor: dict[tuple[str, str], list[WrittenShard]] = {}
    for piece in stored:
        by_tensor.setdefault((piece.kind, piece.name), []).append(piece)
    tensors: dict[str, dict[str, TensorEntry]] = {}
    faults: list[str] = []
    for (kind, name), pieces in sorted(by_tensor.items()):
        facts = {(piece.dtype, piece.global_shape) for piece in pieces}
        dtype, shape = facts.pop()
        rectangles = [Rectangle(piece.entry.offset, piece.entry.shape) for piece in pieces]
        fault = (
            "ranks differ about its dtype or shape"
            if facts
            else covering_problem(shape, rectangles)
        )
        if fault:
            faults.append(f"{kind}/{name}: {fault}")
        ordered = sorted((piece.entry for piece in pieces), key=lambda piece: piece.offset)
        entry = TensorEntry(dtype=dtype, shape=shape, pieces=tuple(ordered))
        tensors.setdefault(kind, {})[name] = entry
    if faults:
        raise CheckpointError(
            CHECKPOINT_COVERS_TENSORS.problem(
                f"ranks do not hold each tensor once: {shown(faults)}"
            )
        )
    return tensors
