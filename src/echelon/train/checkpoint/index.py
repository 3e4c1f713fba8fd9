"""index.json: which file of a checkpoint holds which rectangle of which tensor, and every checksum.

No torch here: a checkpoint can be listed and checked by any Python.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from echelon.core.errors import CheckpointError
from echelon.core.rulebook.checkpoint import (
    CHECKPOINT_EXISTS,
    CHECKPOINT_SCHEMA,
    CHECKPOINT_UNDAMAGED,
)
from echelon.core.serialize import from_json, to_json

SCHEMA = 1
INDEX_FILE = "index.json"
STATE_FILE = "state.json"
PARAMETERS = "parameters"
"""The kind of tensor that every checkpoint has; the others belong to the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Give what a file must be."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Give one rectangle of a tensor: its file and key there, where it starts, its shape."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Give a whole tensor: its dtype as safetensors spells it, its shape, the pieces that it is."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Hold everything that a checkpoint says about itself. `tensors` is by kind, then by name."""

    step: int
    world_size: int
    echelon_version: str
    plan_hash: str
    model_hash: str
    tokenizer_hash: str
    mathematics: Mapping[str, object]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, Mapping[str, TensorEntry]]

    def to_text(self) -> str:
        """Return the index as JSON with one tensor or file to a line, its own checksum last."""
        head: dict[str, Any] = {
            "schema": SCHEMA,
            "step": self.step,
            "world_size": self.world_size,
            "echelon_version": self.echelon_version,
            "plan_hash": self.plan_hash,
            "model_hash": self.model_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "mathematics": self.mathematics,
        }
        files = {name: to_json(entry) for name, entry in self.files.items()}
        tensors = {
            kind: {name: to_json(entry) for name, entry in entries.items()}
            for kind, entries in self.tensors.items()
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        lines.append(f' "files": {_table(files, 1)}')
        kinds = [f"  {json.dumps(kind)}: {_table(table, 2)}" for kind, table in tensors.items()]
        lines.append(' "tensors": {\n' + ",\n".join(kinds) + "\n }")
        checksum = _checksum({**head, "files": files, "tensors": tensors})
        lines.append(f' "checksum": {json.dumps(checksum)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def read_index(path: Path) -> Index:
    """Return the index of the checkpoint folder `path`; CheckpointError says why there is none."""
    try:
        data = json.loads((path / INDEX_FILE).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            CHECKPOINT_EXISTS.problem(f"{path} has no {INDEX_FILE}: it is not a checkpoint")
        ) from error
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            CHECKPOINT_SCHEMA.problem(
                f"{path} has schema {schema}, written by Echelon {data.get('echelon_version')}; "
                f"this version reads schema {SCHEMA}"
            )
        )
    if schema != SCHEMA:
        raise _damaged(path, f"schema {schema!r}")
    checksum = data.pop("checksum", None)
    if checksum != _checksum(data):
        raise _damaged(path, "its content does not have the checksum that it states")
    try:
        return _decode(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _decode(data: dict[str, Any]) -> Index:
    return Index(
        step=data["step"],
        world_size=data["world_size"],
        echelon_version=data["echelon_version"],
        plan_hash=data["plan_hash"],
        model_hash=data["model_hash"],
        tokenizer_hash=data["tokenizer_hash"],
        mathematics=data["mathematics"],
        files={name: from_json(FileEntry, entry) for name, entry in data["files"].items()},
        tensors={
            kind: {name: from_json(TensorEntry, entry) for name, entry in entries.items()}
            for kind, entries in data["tensors"].items()
        },
    )


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        CHECKPOINT_UNDAMAGED.problem(f"{path / INDEX_FILE} cannot be used: {reason}")
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
