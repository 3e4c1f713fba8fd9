"""Which files hold weights, what is in them, and whether that is this model: read from headers.

No torch here: all of it is known before a rank starts.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, cast

from echelon.config.model.config_json import LLAMA3_ROPE, PLAIN_ROPE, rope_entry, rope_type
from echelon.core.disk import is_plain_name, list_names
from echelon.core.errors import CheckpointError, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.weights import (
    WEIGHTS_COMPLETE,
    WEIGHTS_DTYPE,
    WEIGHTS_FILE_EXISTS,
    WEIGHTS_FILE_READABLE,
    WEIGHTS_KNOWN,
    WEIGHTS_POSITIONS,
    WEIGHTS_SHAPE,
    WEIGHTS_TIED_HEAD,
)
from echelon.core.rules import Rule
from echelon.core.serialize import decode_json
from echelon.interop.hugging_face.folder import INDEX_NAME, SINGLE_NAME
from echelon.interop.weight_names.names import WeightNaming, find_naming
from echelon.interop.weight_names.source import ParameterSource

SETTING = "train.weights"


def position_problems(path: Path) -> Iterator[Problem]:
    """Yield that a config.json beside weights turns positions as no model here does.

    Without one, or where it cannot be read, nothing is known: a file of weights does not say.
    """
    beside = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = decode_json(beside.read_bytes())
    except (OSError, ValueError):
        return
    if not isinstance(config, dict):
        return
    key, rope = rope_entry(cast("dict[str, object]", config))
    kind = rope_type(rope)
    if kind not in (PLAIN_ROPE, LLAMA3_ROPE):
        yield WEIGHTS_POSITIONS.problem(
            f"{path} belongs to rotary positions of the kind {json.dumps(kind)} ({beside}: {key}), "
            "which are not computed: with others these weights are another model",
            key=SETTING,
            set_by=f"{beside}: {key}",
        )


DTYPE_SIZES: Mapping[str, int] = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}

_LARGEST_HEADER = 100_000_000  # bytes
_CHUNK_BYTES = 8 * 2**20
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Say where a tensor lies: in which file, from which byte on; its dtype and shape there."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor in the file."""
        return prod(self.shape) * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Hold where each parameter of a model is found, by canonical name."""

    path: Path
    sources: Mapping[str, tuple[StoredTensor, ParameterSource]]


class _Unfit(Exception):
    """Say why a file cannot be used; never seen by users."""


def find_weights(path: Path, shape: ModelShape) -> WeightFiles:
    """Return where `path` keeps the parameters of a model; CheckpointError says what is wrong.

    `path` is a safetensors file, an index of several, or a folder with one or the other. Headers
    are read, and no tensor but a head that must equal the embedding.
    """
    stored = _read_headers(path)
    naming = find_naming(shape, stored)
    if naming is None:
        raise _error(
            WEIGHTS_KNOWN,
            f"the names in {path} are neither Llama's (most families have them), nor those of "
            f"GPT-2, GPT-NeoX or Falcon, nor Echelon's: {_some(sorted(stored))}",
        )
    problems = [*position_problems(path), *_fit_problems(path, shape, stored, naming)]
    if problems:
        raise CheckpointError(problems)
    places = {name: (stored[source.key], source) for name, source in naming.sources.items()}
    return WeightFiles(path=path, sources=places)


def _read_headers(path: Path) -> dict[str, StoredTensor]:
    file = _find_file(path)
    if file.suffix != ".json":
        return _read_header(file)
    by_file: dict[str, list[str]] = {}
    for name, part in _read_index(file).items():
        by_file.setdefault(part, []).append(name)
    missing = [part for part in sorted(by_file) if not (file.parent / part).is_file()]
    if missing:
        raise _error(
            WEIGHTS_FILE_EXISTS,
            f"{file} names files that are missing: {_some(missing)}; {list_names(file.parent)}",
        )
    stored: dict[str, StoredTensor] = {}
    for part, names in by_file.items():
        found = _read_header(file.parent / part)
        lacking = [name for name in names if name not in found]
        if lacking:
            raise _error(
                WEIGHTS_FILE_READABLE,
                f"{file} says that {part} holds {_some(lacking)}, which it does not",
            )
        stored.update((name, found[name]) for name in names)
    return stored


def _find_file(path: Path) -> Path:
    """Return the file or the index that `path` means."""
    if path.is_file():
        if path.suffix in (".safetensors", ".json"):
            return path
        raise _error(WEIGHTS_FILE_EXISTS, f"{path} is no safetensors file and no index of some")
    if path.is_dir():
        for name in (INDEX_NAME, SINGLE_NAME):
            if (path / name).is_file():
                return path / name
        if (path / "index.json").is_file() and (path / "state.json").is_file():
            raise _error(
                WEIGHTS_FILE_EXISTS, f"{path} is a checkpoint of Echelon", f"--resume {path}"
            )
        found = sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        count = f"{len(found)} safetensors files and no index" if found else "no safetensors file"
        raise _error(WEIGHTS_FILE_EXISTS, f"{path} has {count}: {list_names(path)}", *found[:4])
    raise _error(
        WEIGHTS_FILE_EXISTS, f"{path} does not exist: {list_names(path.absolute().parent)}"
    )


def _read_index(file: Path) -> dict[str, str]:
    try:
        data: Any = decode_json(file.read_bytes())
        entries: Any = data["weight_map"]
        parts = {str(name): str(part) for name, part in entries.items()}
    except OSError as error:
        raise _error(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _error(
            WEIGHTS_FILE_READABLE, f'{file} is no index: it has no table "weight_map"'
        ) from error
    outside = [part for part in parts.values() if not is_plain_name(part)]
    if outside:
        raise _error(
            WEIGHTS_FILE_READABLE, f"{file} names files outside of its folder: {_some(outside)}"
        )
    return parts


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            if first + stream.read(len(_LFS) - 8) == _LFS:
                raise _Unfit("is a pointer of Git LFS: the file itself was not fetched")
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else _LARGEST_HEADER
            if length > min(_LARGEST_HEADER, size - 8):
                raise _Unfit(f"is no safetensors file, or was cut short ({size} bytes)")
            stream.seek(8)
            return dict(_entries(file, stream.read(length), start=8 + length, size=size))
    except OSError as error:
        raise _error(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except _Unfit as unfit:
        raise _error(WEIGHTS_FILE_READABLE, f"{file} {unfit}") from unfit


def _entries(
    file: Path, header: bytes, *, start: int, size: int
) -> Iterator[tuple[str, StoredTensor]]:
    try:
        entries: dict[str, Any] = decode_json(header)
        entries.pop("__metadata__", None)
        items = [
            (
                name,
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                tuple(int(n) for n in entry["data_offsets"]),
            )
            for name, entry in entries.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unfit("is no safetensors file: its header cannot be read") from error
    for name, dtype, shape, offsets in items:
        tensor = StoredTensor(file=file, start=start + offsets[0], dtype=dtype, shape=shape)
        end = start + offsets[-1]
        if end > size:
            raise _Unfit(f"was cut short: {name} ends at byte {end} of {size}")
        if dtype in DTYPE_SIZES and (
            min((*shape, *offsets)) < 0
            or len(offsets) != 2
            or end - tensor.start != tensor.num_bytes
        ):
            raise _Unfit(f"is damaged: {name} is {dtype} {list(shape)} in {end - start} bytes")
        yield name, tensor


def _fit_problems(
    path: Path, shape: ModelShape, stored: Mapping[str, StoredTensor], naming: WeightNaming
) -> Iterator[Problem]:
    """Yield what keeps these tensors from being the parameters of the model."""
    wanted = {source.key: source.shape for source in naming.sources.values()}
    lacking = [key for key in wanted if key not in stored]
    config = path if path.is_dir() else path.parent
    suggestions = [f"model.hf_config = {config / 'config.json'}"]
    if not (config / "config.json").is_file():
        suggestions = []
    if lacking == [naming.head] and not shape.tied:
        suggestions = ["model.tied = true", *suggestions]
    if naming.nameless or lacking:
        named = [f"{naming.kind} names have none for {name}" for name in naming.nameless]
        yield _problem(
            WEIGHTS_COMPLETE,
            f"{path} lacks {len(named) + len(lacking)} tensors of {shape.name}: "
            f"{_some([*lacking, *named])}",
            *suggestions,
        )
    found = {key: stored[key] for key in wanted if key in stored}
    if shape.tied and naming.head in stored:
        found[naming.head] = stored[naming.head]
    unknown = [key for key in stored if key not in found and not naming.passes_over(key)]
    if unknown:
        yield _problem(
            WEIGHTS_KNOWN,
            f"{path} holds {len(unknown)} tensors that {shape.name} has no place for: "
            f"{_some(unknown)}",
            *suggestions,
        )
    wrong = [
        f"{key} is {list(stored[key].shape)} there, {list(size)} here"
        for key, size in wanted.items()
        if key in stored and stored[key].shape != size
    ]
    if wrong:
        yield _problem(
            WEIGHTS_SHAPE, f"{path} is of a model of another shape: {_some(wrong)}", *suggestions
        )
    packed = [f"{key} ({one.dtype})" for key, one in found.items() if one.dtype not in DTYPE_SIZES]
    if packed:
        yield _problem(
            WEIGHTS_DTYPE,
            f"{path} holds weights that are not plain floating point: {_some(packed)}",
        )
    head = stored.get(naming.head) if shape.tied else None
    if wrong or packed or lacking or head is None:
        return
    if not _same_bytes(head, stored[naming.sources["embedding.weight"].key]):
        yield _problem(
            WEIGHTS_TIED_HEAD,
            f"{shape.name} has model.tied = true, but {naming.head} in {path} is not the embedding",
            "model.tied = false",
        )


def _same_bytes(one: StoredTensor, two: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    with one.file.open("rb") as first, two.file.open("rb") as second:
        first.seek(one.start)
        second.seek(two.start)
        for position in range(0, one.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, one.num_bytes - position)
            if first.read(size) != second.read(size):
                return False
    return True


def _some(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(islice(names, limit)) + more


def _problem(rule: Rule, message: str, *suggestions: object) -> Problem:
    return rule.problem(message, key=SETTING, suggestions=suggestions)


def _error(rule: Rule, message: str, *suggestions: object) -> CheckpointError:
    return CheckpointError(_problem(rule, message, *suggestions))
