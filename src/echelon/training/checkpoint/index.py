# SPDX-License-Identifier: Apache-2.0
"""index.json: which file of a checkpoint holds which rectangle of which tensor, and every checksum.

What never changes in a run stands once beside its checkpoints, in the folder `base`: an index names
it with its checksum, and who reads the index finds the tensors of both.

No torch here: a checkpoint can be listed and checked by any Python.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, cast

from echelon.core.disk import is_plain_name, list_names
from echelon.core.errors import CheckpointError
from echelon.core.rulebook.run import (
    CHECKPOINT_BASE,
    CHECKPOINT_EXISTS,
    CHECKPOINT_FILES_INSIDE,
    CHECKPOINT_SCHEMA,
    CHECKPOINT_UNDAMAGED,
)
from echelon.core.serialize import decode_json, from_json, to_json

SCHEMA = 2  # the newest that is read
PLAIN_SCHEMA = 1
"""Of an index that names no base: all that it says was known from the beginning."""
BASE_FOLDER = "base"
"""Beside the checkpoints of a run: what never changes in it."""
INDEX_FILE = "index.json"
STATE_FILE = "state.json"
PARAMETERS = "parameters"
"""The kind of tensor that every checkpoint has; the others belong to the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFileEntry:
    """Give what a file must be."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """Give one rectangle of a tensor: its file and key there, where it starts, its shape."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Give a whole tensor: its dtype as safetensors spells it, its shape, the pieces that it is."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[ShardEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseReference:
    """Name the folder beside a checkpoint that holds what never changes, by what its index says."""

    folder: str
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """Hold everything that a checkpoint says about itself."""

    step: int
    """Optimizer steps done."""
    world_size: int
    """Ranks that wrote it."""
    echelon_version: str
    """The version that wrote it."""
    plan_hash: str
    """Hash of the plan that wrote it."""
    model_hash: str
    """Hash of the model's shape."""
    tokenizer_hash: str
    """Hash of the tokenizer."""
    mathematics: Mapping[str, object]
    """What of the plan can change the numbers."""
    files: Mapping[str, CheckpointFileEntry]
    """Its files, by name."""
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    """Its tensors, by kind, then by name."""
    base: BaseReference | None = None
    """Where the tensors are that never change; None where it holds all of them."""

    def to_text(self) -> str:
        """Return the index as JSON with one tensor or file to a line, its own checksum last."""
        schema = PLAIN_SCHEMA if self.base is None else SCHEMA
        content: dict[str, Any] = {"schema": schema, **to_json(self)}
        if self.base is None:
            del content["base"]
        checksum = _checksum(content)
        files, tensors = content.pop("files"), content.pop("tensors")
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        lines.append(f' "files": {_table(files, 1)}')
        kinds = [f"  {json.dumps(kind)}: {_table(table, 2)}" for kind, table in tensors.items()]
        lines.append(' "tensors": {\n' + ",\n".join(kinds) + "\n }")
        lines.append(f' "checksum": {json.dumps(checksum)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def read_index(path: Path) -> CheckpointIndex:
    """Return the index of the checkpoint folder `path`; CheckpointError says why there is none.

    Tensors and files of its base are among its own, by their whole paths.
    """
    index, _ = _read_own(path)
    if index.base is None:
        return index
    folder, base = _read_base(path, index.base)

    def there(piece: ShardEntry) -> ShardEntry:
        return replace(piece, file=str(folder / piece.file))

    tensors = {kind: dict(table) for kind, table in index.tensors.items()}
    for kind, table in base.tensors.items():
        held = tensors.setdefault(kind, {})
        for name, entry in table.items():
            held[name] = replace(entry, pieces=tuple(there(piece) for piece in entry.pieces))
    files = {str(folder / name): entry for name, entry in base.files.items()}
    return replace(index, files={**index.files, **files}, tensors=tensors)


def base_of(path: Path) -> BaseReference | None:
    """Return what the checkpoint folder `path` says of its base, and read no more."""
    return _read_own(path)[0].base


def reference_to(folder: Path) -> BaseReference:
    """Return how checkpoints beside it name a base; CheckpointError where it cannot be read."""
    return BaseReference(folder=folder.name, checksum=_read_own(folder)[1])


def _read_base(path: Path, base: BaseReference) -> tuple[Path, CheckpointIndex]:
    """Return the base of a checkpoint and where it is, once it is the one that is meant."""
    # A checkpoint that was moved and linked back has its base beside the link.
    beside = path.absolute().parent
    if not is_plain_name(base.folder):
        raise CheckpointError(
            CHECKPOINT_FILES_INSIDE.problem(
                f"{path / INDEX_FILE} names a base outside of its run: {base.folder}"
            )
        )
    folder = beside / base.folder
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            CHECKPOINT_BASE.problem(
                f"{path} holds what was trained; the frozen weights below it are to be in "
                f"{folder}, which is not there: {list_names(beside)}",
                suggestions=(f"copy the folder {base.folder} of the run to {folder}",),
            )
        )
    index, checksum = _read_own(folder)
    if checksum != base.checksum:
        raise CheckpointError(
            CHECKPOINT_BASE.problem(
                f"{path} was trained over frozen weights with the index {base.checksum[:12]}..., "
                f"and {folder} has {checksum[:12]}...: it is the base of another run",
                suggestions=(f"copy the folder {base.folder} of the run to {folder}",),
            )
        )
    return folder, index


def _read_own(path: Path) -> tuple[CheckpointIndex, str]:
    """Return what index.json of a folder says, and its checksum."""
    data = _read_table(path, INDEX_FILE)
    schema = data.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            CHECKPOINT_SCHEMA.problem(
                f"{path} has schema {schema}, written by Echelon {data.get('echelon_version')}; "
                f"this version reads schema {SCHEMA}"
            )
        )
    if schema not in (PLAIN_SCHEMA, SCHEMA):
        raise _damaged(path / INDEX_FILE, f"schema {schema!r}")
    checksum = data.pop("checksum", None)
    if checksum != _checksum(data):
        raise _damaged(path / INDEX_FILE, "its content does not have the checksum that it states")
    # Entries that this version does not know say nothing of the tensors.
    known = {one.name: data[one.name] for one in fields(CheckpointIndex) if one.name in data}
    try:
        index = from_json(CheckpointIndex, known, where="index")
    except ValueError as error:
        raise _damaged(path / INDEX_FILE, str(error)) from error
    _require_own_files(path, index)
    return index, str(checksum)


def read_state(path: Path) -> Mapping[str, Any]:
    """Return what state.json of the checkpoint folder `path` says, or raise CheckpointError."""
    return _read_table(path, STATE_FILE)


def _read_table(path: Path, name: str) -> dict[str, Any]:
    try:
        data = decode_json((path / name).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            CHECKPOINT_EXISTS.problem(f"{path} has no {name}: it is not a checkpoint")
        ) from error
    except (OSError, ValueError) as error:
        raise _damaged(path / name, str(error)) from error
    if not isinstance(data, dict):
        raise _damaged(path / name, "it is JSON, and no object")
    return cast("dict[str, Any]", data)


def _require_own_files(path: Path, index: CheckpointIndex) -> None:
    """Raise CheckpointError where a file is outside of the folder, or a piece in none of them."""
    places = (
        piece.file
        for entries in index.tensors.values()
        for entry in entries.values()
        for piece in entry.pieces
    )
    named = dict.fromkeys((*index.files, *places))
    outside = [name for name in named if not is_plain_name(name)]
    if outside:
        raise CheckpointError(
            CHECKPOINT_FILES_INSIDE.problem(
                f"{path / INDEX_FILE} names files outside of its folder: {', '.join(outside[:4])}"
            )
        )
    unknown = [name for name in named if name not in index.files]
    if unknown:
        reason = f"tensors are in files that it gives no checksum of: {', '.join(unknown[:4])}"
        raise _damaged(path / INDEX_FILE, reason)


def _damaged(file: Path, reason: str) -> CheckpointError:
    others = file.parent.parent.glob(f"step-*/{INDEX_FILE}")
    near = sorted({one.parent for one in others} - {file.parent}, reverse=True)
    return CheckpointError(
        CHECKPOINT_UNDAMAGED.problem(f"{file} cannot be used: {reason}", suggestions=near)
    )


def _table(entries: Mapping[str, Any], depth: int) -> str:
    if not entries:
        return "{}"
    indent = " " * depth
    lines = [f"{indent} {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _checksum(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Hold where a rectangle starts and how far it reaches, one number per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Return the first index past the rectangle, per dim."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """Return what is in both, or None where nothing is."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a, b) - start for a, b, start in zip(self.end, other.end, offset, strict=True)
        )
        return Rectangle(offset, shape) if all(size > 0 for size in shape) else None

    def slices_within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Return the slices that cut this rectangle out of an `outer` one that contains it."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def covering_problem(shape: tuple[int, ...], pieces: Sequence[Rectangle]) -> str:
    """Return why `pieces` are not the whole of a tensor of `shape`, each element once; or ""."""
    for piece in pieces:
        if len(piece.offset) != len(shape) or len(piece.shape) != len(shape):
            return f"a piece with {len(piece.offset)} dims, of a tensor with {len(shape)}"
        inside = all(
            0 <= a < b <= n for a, b, n in zip(piece.offset, piece.end, shape, strict=True)
        )
        if not inside:
            return f"the piece {_spell(piece)} is not inside {list(shape)}"
    open_pieces: list[Rectangle] = []
    for piece in sorted(pieces, key=lambda p: p.offset):
        # Pieces come by their first row, so those that ended above this row are done with.
        open_pieces = [p for p in open_pieces if not shape or p.end[0] > piece.offset[0]]
        for earlier in open_pieces:
            if earlier.intersection(piece):
                return f"the pieces {_spell(earlier)} and {_spell(piece)} overlap"
        open_pieces.append(piece)
    covered = sum(piece.numel for piece in pieces)
    if covered != prod(shape):
        return f"{len(pieces)} pieces hold {covered} of {prod(shape)} elements of {list(shape)}"
    return ""


def _spell(piece: Rectangle) -> str:
    spans = (f"{a}:{b}" for a, b in zip(piece.offset, piece.end, strict=True))
    return f"[{', '.join(spans)}]"
