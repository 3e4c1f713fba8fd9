# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files: which tensors a file or a folder holds, and at which bytes.

No torch here: all of it is known before a rank starts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.core.disk import is_plain_name, list_names
from echelon.core.rulebook.weights import WEIGHTS_FILE_EXISTS, WEIGHTS_FILE_READABLE
from echelon.core.serialize import decode_json
from echelon.interop.hugging_face.folder import INDEX_NAME, SINGLE_NAME
from echelon.training.weights.pickles import NotReadable
from echelon.training.weights.stored import DTYPE_SIZES, StoredTensor, whole
from echelon.training.weights.trainers.contents import refuse, some

_LARGEST_HEADER = 100_000_000  # bytes
_LFS = b"version https://git-lfs"


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, an index of several, or a folder with one or the other."""
    file = _find_file(path)
    if file.suffix != ".json":
        return _read_header(file)
    by_file: dict[str, list[str]] = {}
    for name, part in _read_index(file).items():
        by_file.setdefault(part, []).append(name)
    missing = [part for part in sorted(by_file) if not (file.parent / part).is_file()]
    if missing:
        raise refuse(
            WEIGHTS_FILE_EXISTS,
            f"{file} names files that are missing: {some(missing)}; {list_names(file.parent)}",
        )
    stored: dict[str, StoredTensor] = {}
    for part, names in by_file.items():
        found = _read_header(file.parent / part)
        lacking = [name for name in names if name not in found]
        if lacking:
            raise refuse(
                WEIGHTS_FILE_READABLE,
                f"{file} says that {part} holds {some(lacking)}, which it does not",
            )
        stored.update((name, found[name]) for name in names)
    return stored


def _find_file(path: Path) -> Path:
    """Return the file or the index that `path` means."""
    if path.is_file():
        if path.suffix in (".safetensors", ".json"):
            return path
        raise refuse(
            WEIGHTS_FILE_EXISTS,
            f"{path} is no safetensors file and no index of some",
            *_weights_near(path),
        )
    if path.is_dir():
        for name in (INDEX_NAME, SINGLE_NAME):
            if (path / name).is_file():
                return path / name
        if (path / "index.json").is_file() and (path / "state.json").is_file():
            raise refuse(
                WEIGHTS_FILE_EXISTS, f"{path} is a checkpoint of Echelon", f"--resume {path}"
            )
        found = sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        count = f"{len(found)} safetensors files and no index" if found else "no safetensors file"
        near = found[:4] or _weights_near(path)
        raise refuse(WEIGHTS_FILE_EXISTS, f"{path} has {count}: {list_names(path)}", *near)
    raise refuse(
        WEIGHTS_FILE_EXISTS,
        f"{path} does not exist: {list_names(path.absolute().parent)}",
        *_weights_near(path),
    )


def _weights_near(path: Path) -> list[str]:
    """Return settings: folders of weights next to a path, and a start without weights."""
    beside = path.absolute().parent
    found = {one.parent for one in beside.glob("*/*.safetensors")} if beside.is_dir() else set()
    return [*(f'train.weights = "{one}"' for one in sorted(found)[:4]), 'train.weights = "none"']


def _read_index(file: Path) -> dict[str, str]:
    try:
        data: Any = decode_json(file.read_bytes())
        entries: Any = data["weight_map"]
        parts = {str(name): str(part) for name, part in entries.items()}
    except OSError as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse(
            WEIGHTS_FILE_READABLE, f'{file} is no index: it has no table "weight_map"'
        ) from error
    outside = [part for part in parts.values() if not is_plain_name(part)]
    if outside:
        raise refuse(
            WEIGHTS_FILE_READABLE, f"{file} names files outside of its folder: {some(outside)}"
        )
    return parts


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            if first + stream.read(len(_LFS) - 8) == _LFS:
                raise NotReadable("is a pointer of Git LFS: the file itself was not fetched")
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else _LARGEST_HEADER
            if length > min(_LARGEST_HEADER, size - 8):
                raise NotReadable(f"is no safetensors file, or was cut short ({size} bytes)")
            stream.seek(8)
            return dict(_entries(file, stream.read(length), start=8 + length, size=size))
    except OSError as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except NotReadable as unfit:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} {unfit}") from unfit


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
        raise NotReadable("is no safetensors file: its header cannot be read") from error
    for name, dtype, shape, offsets in items:
        tensor = whole(file, start + offsets[0], dtype, shape)
        end = start + offsets[-1]
        if end > size:
            raise NotReadable(f"was cut short: {name} ends at byte {end} of {size}")
        if dtype in DTYPE_SIZES and (
            min((*shape, *offsets)) < 0
            or len(offsets) != 2
            or end - start - offsets[0] != tensor.num_bytes
        ):
            raise NotReadable(f"is damaged: {name} is {dtype} {list(shape)} in {end - start} bytes")
        yield name, tensor
