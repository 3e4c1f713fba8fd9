# SPDX-License-Identifier: Apache-2.0
"""Which files hold weights, what is in them, and whether that is this model: read from headers.

A header of safetensors says which tensors a file or a folder holds, and at which bytes. Which
trainer wrote a folder is known by what is in it; of its saves the newest is meant.

No torch here: all of it is known before a rank starts.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

from echelon.config.job import Job
from echelon.config.model.architectures.common import (
    DYNAMIC_ROPE,
    PLAIN_ROPE,
    rope_entry,
    rope_type,
)
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.disk import is_plain_name, list_names
from echelon.core.errors import CheckpointError, Problem
from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.weights import (
    WEIGHTS_COMPLETE,
    WEIGHTS_DTYPE,
    WEIGHTS_FILE_EXISTS,
    WEIGHTS_FILE_READABLE,
    WEIGHTS_KNOWN,
    WEIGHTS_OPTIMIZER,
    WEIGHTS_POSITIONS,
    WEIGHTS_SHAPE,
    WEIGHTS_TIED_HEAD,
)
from echelon.core.rules import Rule
from echelon.core.serialize import decode_json
from echelon.interop.hugging_face.folder import INDEX_NAME, SINGLE_NAME
from echelon.interop.weight_names.names import WeightNaming, find_naming
from echelon.interop.weight_names.source import ParameterSource
from echelon.training.weights.pickles import NotReadable
from echelon.training.weights.stored import DTYPE_SIZES, StoredTensor, same_values, whole
from echelon.training.weights.trainers.contents import (
    SETTING,
    TrainerCheckpoint,
    moment_of,
    refuse,
    some,
    unwrapped,
)
from echelon.training.weights.trainers.deepspeed import (
    MODEL_FILES,
    OPTIMIZER_FILES,
    PARAMETERS,
    read_deepspeed,
    read_universal,
)
from echelon.training.weights.trainers.distributed import METADATA, read_distributed
from echelon.training.weights.trainers.megatron import rank_folders, read_megatron

_LARGEST_HEADER = 100_000_000  # bytes
_LFS = b"version https://git-lfs"

POINTERS = ("latest_universal", "latest", "latest_checkpointed_iteration.txt")
"""Files that name the folder of the newest save."""
_LONGEST_NAME = 200  # characters of such a file


def position_problems(path: Path, shape: ModelShape) -> Iterator[Problem]:
    """Yield that a config.json beside weights turns positions as the model does not.

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
    ours = None if shape.rope_scaling is None else shape.rope_scaling.kind
    if kind not in (PLAIN_ROPE, DYNAMIC_ROPE, "llama3", ours):
        yield WEIGHTS_POSITIONS.problem(
            f"{path} belongs to rotary positions of the kind {json.dumps(kind)} ({beside}: {key}), "
            "which are not those of the model: with others these weights are another model",
            key=SETTING,
            set_by=f"{beside}: {key}",
        )


Places = Mapping[str, tuple[StoredTensor, ParameterSource]]
"""Where each parameter is found, by canonical name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Hold where each parameter of a model is found, by canonical name.

    `moments` has what an optimizer keeps of each, by kind, where a trainer saved it, and `step` how
    many updates it made.
    """

    path: Path
    sources: Places
    moments: Mapping[str, Places] = field(default_factory=dict[str, Places])
    step: int | None = None


def find_weights(path: Path, shape: ModelShape) -> WeightFiles:
    """Return where `path` keeps the parameters of a model; CheckpointError says what is wrong.

    `path` is a safetensors file, an index of several, a folder with one or the other, or the
    checkpoint of a trainer (`trainers/`). Headers are read, and no tensor but a head that must
    equal the embedding.
    """
    trainer = read_trainer(path, shape)
    stored = read_headers(path) if trainer is None else unwrapped(trainer.weights)
    naming = find_naming(shape, stored)
    if naming is None:
        raise refuse(
            WEIGHTS_KNOWN,
            f"the names in {path} are neither Llama's (most families have them), nor those of "
            "GPT-2, GPT-NeoX or Falcon, nor torchtitan's, Megatron-core's or Echelon's: "
            f"{some(sorted(stored))}",
        )
    problems = [*position_problems(path, shape), *_fit_problems(path, shape, stored, naming)]
    if problems:
        raise CheckpointError(problems)
    return WeightFiles(
        path=path,
        sources=_places(stored, naming),
        moments={} if trainer is None else _moments(trainer, naming),
        step=None if trainer is None else trainer.step,
    )


def require_optimizer(found: WeightFiles, job: Job) -> int:
    """Return the step that a run goes on from; CheckpointError with all that keeps it."""
    numbers = job.plan.mathematics
    kept = OPTIMIZERS[numbers.optimizer.kind].state
    reasons: list[str] = []
    lacking = [kind for kind in kept if kind not in found.moments]
    if lacking:
        reasons.append(
            f"{found.path} has no {' and no '.join(lacking)} of each weight, which "
            f"optimizer.kind = {numbers.optimizer.kind} keeps"
        )
    if found.step is None:
        reasons.append(f"{found.path} does not say how many steps were made")
    elif found.step >= job.train.steps:
        reasons.append(
            f"{found.path} is of step {found.step}, and train.steps is {job.train.steps}"
        )
    if job.plan.model.lora is not None:
        reasons.append("adapters (lora.rank) are new, and what a trainer kept is of other weights")
    if numbers.updates.is_asynchronous or numbers.local_sgd.islands > 1:
        reasons.append("parameter servers and islands have optimizers of their own")
    if reasons:
        raise CheckpointError([_optimizer_problem(reason) for reason in reasons])
    assert found.step is not None, "it was asked for"
    return found.step


def _optimizer_problem(reason: str) -> Problem:
    return WEIGHTS_OPTIMIZER.problem(reason, key="train.weights_optimizer")


def _places(stored: Mapping[str, StoredTensor], naming: WeightNaming) -> Places:
    return {name: (stored[source.key], source) for name, source in naming.sources.items()}


def _moments(trainer: TrainerCheckpoint, naming: WeightNaming) -> Mapping[str, Places]:
    """Return where what an optimizer keeps is, of the kinds that are there of all parameters."""
    found: dict[str, Places] = {}
    for kind, stored in trainer.moments.items():
        there = {
            source.key: one
            for source in naming.sources.values()
            if (one := moment_of(stored, source.key)) is not None
            and source.fits(one.shape)
            and not one.lacking
        }
        if all(source.key in there for source in naming.sources.values()):
            found[kind] = _places(there, naming)
    return found


def _fit_problems(
    path: Path, shape: ModelShape, stored: Mapping[str, StoredTensor], naming: WeightNaming
) -> Iterator[Problem]:
    """Yield what keeps these tensors from being the parameters of the model."""
    wanted = {source.key: source for source in naming.sources.values()}
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
            f"{some([*lacking, *named])}",
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
            f"{some(unknown)}",
            *suggestions,
        )
    wrong = [
        f"{key} is {list(stored[key].shape)} there, {list(source.shape)} here"
        for key, source in wanted.items()
        if key in stored and not source.fits(stored[key].shape)
    ]
    if wrong:
        yield _problem(
            WEIGHTS_SHAPE, f"{path} is of a model of another shape: {some(wrong)}", *suggestions
        )
    packed = [f"{key} ({one.dtype})" for key, one in found.items() if one.dtype not in DTYPE_SIZES]
    if packed:
        yield _problem(
            WEIGHTS_DTYPE,
            f"{path} holds weights that are not plain floating point: {some(packed)}",
        )
    torn = [key for key, one in found.items() if one.lacking]
    if torn:
        first = found[torn[0]]
        yield _problem(
            WEIGHTS_COMPLETE,
            f"{path} does not hold each element of {len(torn)} tensors once: {some(torn)} (of "
            f"{prod(first.shape)} elements of the first, {prod(first.shape) - first.lacking})",
        )
    head = stored.get(naming.head) if shape.tied else None
    if wrong or packed or lacking or torn or head is None:
        return
    if not same_values(head, stored[naming.sources["embedding.weight"].key], shape.vocab):
        yield _problem(
            WEIGHTS_TIED_HEAD,
            f"{shape.name} has model.tied = true, but {naming.head} in {path} is not the embedding",
            "model.tied = false",
        )


def _problem(rule: Rule, message: str, *suggestions: object) -> Problem:
    return rule.problem(message, key=SETTING, suggestions=suggestions)


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


def read_trainer(path: Path, shape: ModelShape) -> TrainerCheckpoint | None:
    """Return what the checkpoint of a trainer holds; None where no trainer wrote the folder.

    CheckpointError says what of it is missing or cannot be read.
    """
    if not path.is_dir():
        return None
    folder = _newest(path)
    if (folder / METADATA).is_file():
        return read_distributed(folder)
    if (folder / PARAMETERS).is_dir():
        return read_universal(folder)
    if rank_folders(folder):
        return read_megatron(folder, shape)
    if any(folder.glob(MODEL_FILES)) or any(folder.glob(OPTIMIZER_FILES)):
        return read_deepspeed(folder)
    if any(folder.glob("*.distcp")):
        raise refuse(
            WEIGHTS_FILE_EXISTS,
            f"{folder} has files of torch.distributed.checkpoint, and no {METADATA} that says what "
            f"is in them: {list_names(folder)}",
        )
    if folder != path:
        raise refuse(
            WEIGHTS_FILE_EXISTS,
            f"{folder}, the newest save in {path}, is of no trainer that is known: "
            f"{list_names(folder)}",
        )
    return None


def _newest(path: Path) -> Path:
    """Return the folder of the newest save, or `path` where it is one itself."""
    for name in POINTERS:
        file = path / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")[:_LONGEST_NAME].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error}") from error
        tag = f"iter_{int(text):07d}" if name.endswith(".txt") and text.isdigit() else text
        folder = path / tag
        if not tag or Path(tag).name != tag or not folder.is_dir():
            there = sorted(one.name for one in path.iterdir() if one.is_dir())
            raise refuse(
                WEIGHTS_FILE_EXISTS,
                f"{file} points to {tag!r}, which is not there: {list_names(path)}",
                *(path / one for one in there[-4:]),
            )
        return folder
    return path
