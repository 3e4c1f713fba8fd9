# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint: torchtitan, FSDP2, and Megatron-core's torch_dist.

`.metadata` is a pickle that says of each tensor which chunks it is cut into, and of each chunk in
which file it lies (`__0_0.distcp`), where, and how long it is. A chunk there is what torch.save
writes of one tensor. Megatron-core stacks the layers of a model in one tensor, whose first dim
counts them; here they are taken apart again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from echelon.core.disk import is_plain_name, list_names
from echelon.core.rulebook.weights import (
    WEIGHTS_COMPLETE,
    WEIGHTS_FILE_EXISTS,
    WEIGHTS_FILE_READABLE,
)
from echelon.interop.weight_names.megatron import LAYERS
from echelon.training.weights.pickles import (
    NotReadable,
    PickledTensor,
    Unread,
    dtype_name,
    read_archive,
    read_pickle,
)
from echelon.training.weights.stored import (
    DTYPE_SIZES,
    StoredBlock,
    StoredTensor,
    cut_blocks,
    layers_of,
)
from echelon.training.weights.trainers.contents import (
    MOMENTS,
    TrainerCheckpoint,
    refuse,
    some,
)

METADATA = ".metadata"
_STEPS = (r"(?:optimizer|optim)\.state\.(?:.+\.)?step", r"train_state(?:\.step)?")
"""Under which keys the number of updates is: of an optimizer, of torchtitan."""
COMMON = "common.pt"
"""What Megatron-core keeps beside tensors."""

_ASIDE = ("optimizer.", "optim.", "lr_scheduler", "train_state", "dataloader", "chained_")
"""How what is no weight begins."""
_MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
"""How Megatron-core calls values in fp32 that its optimizer updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    """Hold what `.metadata` says: of tensors dtype, shape, chunks; of chunks their place."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], tuple[_Chunk, ...]]]
    places: Mapping[tuple[str, tuple[int, ...]], _Place]


def read_distributed(folder: Path) -> TrainerCheckpoint:
    """Return what a folder of torch.distributed.checkpoint holds."""
    metadata = _read_metadata(folder)
    wanted = {place.file for place in metadata.places.values()}
    outside = [name for name in sorted(wanted) if not is_plain_name(name)]
    if outside:
        raise refuse(
            WEIGHTS_FILE_READABLE,
            f"{folder / METADATA} names files outside of its folder: {some(outside)}",
        )
    missing = [name for name in sorted(wanted) if not (folder / name).is_file()]
    if missing:
        raise refuse(
            WEIGHTS_FILE_EXISTS,
            f"{folder / METADATA} names files that are missing: {some(missing)}; "
            f"{list_names(folder)}",
        )
    chosen = _chosen(metadata.tensors)
    found: dict[str, dict[str, StoredTensor]] = {}
    for key, (kind, name) in chosen.items():
        found.setdefault(kind, {})[name] = _tensor(folder, metadata, key)
    weights = {**_taken_apart(found.get("weights", {})), **_taken_apart(found.get("masters", {}))}
    return TrainerCheckpoint(
        told="a folder of torch.distributed.checkpoint",
        weights=weights,
        moments={kind: _taken_apart(found[kind]) for kind in MOMENTS if kind in found},
        step=_step(folder, metadata),
    )


def _read_metadata(folder: Path) -> _Metadata:
    file = folder / METADATA
    try:
        return _metadata(read_pickle(file.read_bytes()))
    except OSError as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except (NotReadable, AttributeError, KeyError, TypeError, ValueError) as error:
        raise refuse(
            WEIGHTS_FILE_READABLE,
            f"{file} is not what torch.distributed.checkpoint writes: {error}",
        ) from error


def _metadata(content: Any) -> _Metadata:
    tensors: dict[str, tuple[str, tuple[int, ...], tuple[_Chunk, ...]]] = {}
    for key, entry in content.field("state_dict_metadata").items():
        if entry.name != "TensorStorageMetadata":
            continue
        chunks = tuple(
            _Chunk(offset=_dims(one.field("offsets")), size=_dims(one.field("sizes")))
            for one in entry.field("chunks")
        )
        dtype = dtype_name(cast("tuple[object, ...]", entry.field("properties").state)[0])
        tensors[str(key)] = (dtype, _dims(entry.field("size")), chunks)
    places: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for index, info in content.field("storage_data").items():
        key = str(index.field("fqn"))
        if info.field("transform_descriptors"):
            raise NotReadable(f"{key} was transformed when it was written (compressed)")
        place = _Place(
            file=str(info.field("relative_path")),
            start=int(info.field("offset")),
            length=int(info.field("length")),
        )
        offset = index.field("offset")
        places[key, _dims(offset or ())] = place
    return _Metadata(tensors=tensors, places=places)


def _dims(size: Any) -> tuple[int, ...]:
    if isinstance(size, Unread):
        size = size.arguments[0]
    return tuple(int(one) for one in size)


def _chosen(tensors: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return of each tensor that is wanted whether it is a weight or a moment, and its name."""
    found: dict[str, tuple[str, str]] = {}
    for key in tensors:
        kind, name = _kind(key)
        if kind:
            found[key] = kind, name
    return found


def _kind(key: str) -> tuple[str, str]:
    """Return what a key means: ("weights", name), ("exp_avg", name), or ("", key) for the rest."""
    for prefix in _MASTERS:
        if key.startswith(prefix):
            return "masters", key.removeprefix(prefix)
    for moment in MOMENTS:
        if key.startswith(f"optimizer.state.{moment}."):
            return moment, key.removeprefix(f"optimizer.state.{moment}.")
        # torchtitan, and optimizers whose state get_state_dict flattens.
        match = re.fullmatch(rf"(?:optimizer|optim)\.state\.(.+)\.{moment}", key)
        if match:
            return moment, match[1]
    if key.startswith(_ASIDE) or key.endswith("_extra_state") or "/shard_" in key:
        return "", key
    return "weights", key


def _tensor(folder: Path, metadata: _Metadata, key: str) -> StoredTensor:
    dtype, shape, chunks = metadata.tensors[key]
    blocks = [
        block
        for chunk in dict.fromkeys(chunks)
        for block in _chunk_blocks(folder, metadata, key, chunk)
    ]
    return StoredTensor(dtype=dtype, shape=shape, blocks=tuple(blocks))


def _chunk_blocks(
    folder: Path, metadata: _Metadata, key: str, chunk: _Chunk
) -> Iterator[StoredBlock]:
    dtype, shape, _ = metadata.tensors[key]
    place = metadata.places.get((key, chunk.offset))
    if place is None and not any(chunk.offset):
        place = metadata.places.get((key, ()))
    if place is None:
        raise refuse(
            WEIGHTS_COMPLETE,
            f"{folder / METADATA} says in no file where {key} lies from {list(chunk.offset)} on",
        )
    file = folder / place.file
    try:
        tensor = read_archive(file, place.start, place.length)
        if not isinstance(tensor, PickledTensor) or tensor.shape != chunk.size:
            raise NotReadable(f"holds another tensor than {METADATA} says where {key} lies")
        if not tensor.contiguous:
            raise NotReadable(f"holds {key} with its dims in another order")
    except OSError as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except NotReadable as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} {error}") from error
    item = DTYPE_SIZES.get(dtype, 1)
    yield from cut_blocks(file, tensor.start, item, shape, chunk.offset, chunk.size)


def _taken_apart(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors with those that hold a layer to a row of their first dim taken apart."""
    found: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        home, there, rest = key.partition(LAYERS)
        if not there or rest[:1].isdigit():
            found[key] = tensor
            continue
        for layer, one in enumerate(layers_of(tensor)):
            found[f"{home}{LAYERS}{layer}.{rest}"] = one
    return found


def _step(folder: Path, metadata: _Metadata) -> int | None:
    """Return how many updates were made, where a tensor or an object says so.

    CheckpointError where what says so cannot be read: a run would begin anew without a word.
    """
    common = folder / COMMON
    if common.is_file():
        content = _said_at(common, None)
        if not isinstance(content, dict):
            raise refuse(WEIGHTS_FILE_READABLE, f"{common} is not what Megatron-core writes")
        return number_in(cast("dict[str, Any]", content).get("iteration"))
    for pattern in _STEPS:
        for (key, _), place in metadata.places.items():
            if re.fullmatch(pattern, key):
                content = _said_at(folder / place.file, place)
                if isinstance(content, dict):
                    content = cast("dict[str, Any]", content).get("step")
                return number_in(content)
    return None


def _said_at(file: Path, place: _Place | None) -> object:
    """Return what torch.save wrote into a file, or at a place in it."""
    try:
        if place is None:
            return read_archive(file)
        return read_archive(file, place.start, place.length)
    except OSError as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except NotReadable as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file}, which says the step, {error}") from error


def number_in(value: object) -> int | None:
    """Return a whole number that stands in a pickle as it is, or as a tensor of one element."""
    if isinstance(value, int | float):
        return int(value)
    if isinstance(value, PickledTensor) and value.numel == 1:
        return read_number(value)
    return None


def read_number(tensor: PickledTensor) -> int | None:
    """Return the one element of a tensor as a whole number."""
    import struct

    code = {"F32": "<f", "F64": "<d", "Long": "<q", "Int": "<i"}.get(tensor.dtype)
    if code is None:
        return None
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        data = stream.read(struct.calcsize(code))
    return int(struct.unpack(code, data)[0])
