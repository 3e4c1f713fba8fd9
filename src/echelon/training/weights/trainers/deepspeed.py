# SPDX-License-Identifier: Apache-2.0
"""Folders of DeepSpeed: ZeRO of every stage, the values in fp32 that its optimizer updates first.

A folder holds one tag for each save, and `latest` says which is the newest. In a tag are the states
of the module, `mp_rank_00_model_states.pt` (at stage 3 one of each rank, without values), and those
of the optimizer, `zero_pp_rank_0_mp_rank_00_optim_states.pt` and so on. Up to stage 2 all
parameters of a group lie end to end in a buffer that is cut into one part for each rank; at stage 3
each parameter is cut so, and each rank's parts lie end to end.

Universal folders, which ds_to_universal makes, have a folder for each parameter.
`zero/NAME/fp32.pt` holds a parameter, `exp_avg.pt` and `exp_avg_sq.pt` beside it what Adam keeps of
it. Of runs at stage 3 they are flat: the states of the module say their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from echelon.core.disk import list_names
from echelon.core.rulebook.weights import (
    WEIGHTS_FILE_READABLE,
    WEIGHTS_RANKS_COMPLETE,
    WEIGHTS_TRAINER_KNOWN,
)
from echelon.training.weights.pickles import (
    NotReadable,
    PickledTensor,
    Unread,
    read_archive,
)
from echelon.training.weights.stored import StoredTensor
from echelon.training.weights.trainers.contents import (
    MOMENTS,
    TrainerCheckpoint,
    flat_tensor,
    refuse,
    shared_tensor,
    some,
    stored_tensor,
)
from echelon.training.weights.trainers.distributed import number_in

MODEL_FILES = "*_model_states.pt"
OPTIMIZER_FILES = "*_optim_states.pt"
_RANKS = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")
_LARGEST_STAGE = 2
"""Up to it the parameters of a group lie end to end, whatever rank has them."""

Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""The parameters of each group in order, with their shapes."""
_Parts = Sequence[Sequence[PickledTensor]]
"""Of each rank the flat buffers of all groups."""

PARAMETERS = "zero"
"""The folder of all parameters."""
VALUES = "fp32"


def read_deepspeed(folder: Path) -> TrainerCheckpoint:
    """Return what the folder of one tag holds."""
    models = _model_files(folder)
    first = read_file(models[0])
    _require_plain(folder, models, first)
    optimizers = _optimizer_files(folder)
    if not optimizers:
        return TrainerCheckpoint(
            told="a folder of DeepSpeed", weights=_module(models[0], first), step=_steps(first)
        )
    try:
        zero = _zero(folder, optimizers)
        weights = {
            **_frozen(models, first, zero),
            **zero.tensors(first["param_shapes"], zero.masters),
        }
        for alias, name in dict(first.get("shared_params") or {}).items():
            if name in weights:
                weights[alias] = weights[name]
        moments = {
            kind: zero.tensors(first["param_shapes"], parts) for kind, parts in zero.moments.items()
        }
    except (NotReadable, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise refuse(
            WEIGHTS_FILE_READABLE, f"{folder} is not what DeepSpeed writes: {error}"
        ) from error
    return TrainerCheckpoint(
        told=f"a folder of DeepSpeed, ZeRO {zero.stage} of {len(zero.masters)} ranks",
        weights=weights,
        moments=moments,
        step=_steps(first),
    )


def read_file(file: Path) -> Any:
    """Return what torch.save wrote into a file of a folder; CheckpointError where it cannot be."""
    try:
        return read_archive(file)
    except OSError as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} cannot be read: {error.strerror}") from error
    except NotReadable as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Zero:
    """Hold the flat buffers of all ranks; `paddings` are elements after each parameter."""

    stage: int
    masters: _Parts
    moments: Mapping[str, _Parts]
    paddings: Sequence[Sequence[int]] | None

    def tensors(self, shapes: Shapes, parts: _Parts) -> dict[str, StoredTensor]:
        """Return where each parameter lies in buffers of one kind."""
        if self.stage > _LARGEST_STAGE:
            return dict(self._of_each_rank(shapes, parts))
        return dict(self._end_to_end(shapes, parts))

    def _end_to_end(self, shapes: Shapes, parts: _Parts) -> Iterator[tuple[str, StoredTensor]]:
        for group, named in enumerate(shapes):
            buffers = [rank[group] for rank in parts]
            begin = 0
            for place, (name, shape) in enumerate(named.items()):
                yield name, flat_tensor(buffers, begin, shape)
                begin += prod(shape)
                if self.paddings is not None:
                    begin += int(self.paddings[group][place])

    def _of_each_rank(self, shapes: Shapes, parts: _Parts) -> Iterator[tuple[str, StoredTensor]]:
        begin = 0
        for named in shapes:
            for name, shape in named.items():
                yield name, shared_tensor(parts, begin, shape)
                begin += -(-prod(shape) // len(parts))


def _zero(folder: Path, files: Sequence[Path]) -> _Zero:
    states = [cast("dict[str, Any]", read_file(file)["optimizer_state_dict"]) for file in files]
    stage = _whole_number(states[0]["zero_stage"])
    count = states[0]["partition_count"]
    world = max(map(int, count)) if isinstance(count, list) else int(count)
    if world != len(files):
        there = {int(_ranks_of(file)[0]) for file in files}
        lacking = [rank for rank in range(world) if rank not in there]
        raise refuse(
            WEIGHTS_RANKS_COMPLETE,
            f"{folder} was written by {world} ranks, and has the optimizer states of {len(files)}: "
            f"those of rank {some(lacking)} are missing",
        )
    if stage > _LARGEST_STAGE:
        masters = [state["fp32_flat_groups"] for state in states]
        inner = [state["optimizer_state_dict"]["state"] for state in states]
    else:
        masters = [state["single_partition_of_fp32_groups"] for state in states]
        inner = [_base_state(state["base_optimizer_state"]) for state in states]
    groups = len(masters[0])
    moments = {
        kind: [[rank[group][kind] for group in range(groups)] for rank in inner]
        for kind in MOMENTS
        if all(kind in rank.get(group, {}) for rank in inner for group in range(groups))
    }
    return _Zero(
        stage=stage,
        masters=masters,
        moments=moments,
        paddings=states[0].get("param_alignment_paddings"),
    )


def _base_state(state: Any) -> Any:
    """Return the state of each group: of an elastic checkpoint there is a list without a name."""
    return state["state"] if isinstance(state, dict) else dict(enumerate(state))


def _whole_number(value: Any) -> int:
    one: Any = value.arguments[0] if isinstance(value, Unread) else value
    return int(one)


def _model_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(MODEL_FILES), key=_natural)
    if not found:
        raise refuse(
            WEIGHTS_RANKS_COMPLETE,
            f"{folder} has no states of the module ({MODEL_FILES}): {list_names(folder)}",
        )
    return found


def _optimizer_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(OPTIMIZER_FILES), key=_natural)


def _natural(file: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", file.name)]


def _ranks_of(file: Path) -> tuple[str, str]:
    match = _RANKS.search(file.name)
    if match is None:
        raise NotReadable(f"has no rank in the name {file.name}")
    return match[1], match[2]


def _require_plain(folder: Path, models: Sequence[Path], first: Any) -> None:
    """Raise CheckpointError for modules that are cut: by tensor ranks, or into stages."""
    cut = [file.name for file in models if not file.name.endswith("mp_rank_00_model_states.pt")]
    if cut:
        raise refuse(
            WEIGHTS_TRAINER_KNOWN,
            f"{folder} is of a module that DeepSpeed cut over tensor ranks or pipeline stages "
            f"({some(cut)}): how, no file says",
        )
    if not isinstance(first, dict) or "module" not in first:
        raise refuse(
            WEIGHTS_FILE_READABLE, f"{models[0]} is not what DeepSpeed writes: it has no module"
        )


def _module(file: Path, content: Any) -> dict[str, StoredTensor]:
    """Return the values of a module that one file holds whole."""
    module = content["module"]
    if not isinstance(module, dict):
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} has no values of a module")
    return _plain_tensors(file, cast("dict[str, Any]", module))


def _plain_tensors(file: Path, tensors: Mapping[str, Any]) -> dict[str, StoredTensor]:
    try:
        return {
            name: stored_tensor(value)
            for name, value in tensors.items()
            if isinstance(value, PickledTensor)
        }
    except NotReadable as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} {error}") from error


def _frozen(models: Sequence[Path], first: Any, zero: _Zero) -> dict[str, StoredTensor]:
    """Return parameters that no optimizer updates, which stand beside the module."""
    shapes = first.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    if zero.stage <= _LARGEST_STAGE:
        return _plain_tensors(models[0], first["frozen_param_fragments"])
    every = [first, *(read_file(file) for file in models[1:])]
    return {
        name: shared_tensor([[one["frozen_param_fragments"][name]] for one in every], 0, shape)
        for name, shape in shapes.items()
    }


def _steps(content: Any) -> int | None:
    """Return how many updates were made: those that a loss scale skipped made none."""
    found: Callable[[str], Any] = cast("dict[str, Any]", content).get
    steps, skipped = found("global_steps"), found("skipped_steps")
    if not isinstance(steps, int):
        return None
    return steps - (skipped if isinstance(skipped, int) else 0)


def read_universal(folder: Path) -> TrainerCheckpoint:
    """Return what the folder of one tag holds."""
    rooms = sorted(path for path in (folder / PARAMETERS).iterdir() if path.is_dir())
    lacking = [room.name for room in rooms if not (room / f"{VALUES}.pt").is_file()]
    if lacking or not rooms:
        where = folder / PARAMETERS
        raise refuse(
            WEIGHTS_RANKS_COMPLETE,
            f"{where} has no {VALUES}.pt of {some(lacking) or 'any parameter'}: "
            f"{list_names(where)}",
        )
    state = _state(folder)
    shapes = _shapes(state)
    weights = {room.name: _tensor(room / f"{VALUES}.pt", shapes) for room in rooms}
    moments = {
        kind: {
            room.name: _tensor(room / f"{kind}.pt", shapes)
            for room in rooms
            if (room / f"{kind}.pt").is_file()
        }
        for kind in MOMENTS
    }
    return TrainerCheckpoint(
        told="a universal folder of DeepSpeed",
        weights=weights,
        moments={kind: found for kind, found in moments.items() if found},
        step=_step(rooms[0], state),
    )


def _state(folder: Path) -> dict[str, Any]:
    """Return what the states of the module say; nothing where they are not there."""
    files = sorted(folder.glob(MODEL_FILES))
    content = read_file(files[0]) if files else None
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    groups = state.get("param_shapes") or []
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _tensor(file: Path, shapes: dict[str, tuple[int, ...]]) -> StoredTensor:
    content = read_file(file)
    value = cast("dict[str, Any]", content).get("param") if isinstance(content, dict) else content
    if not isinstance(value, PickledTensor):
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} holds no tensor")
    shape = shapes.get(file.parent.name, value.shape)
    if len(value.shape) != 1 or prod(shape) > value.numel:
        shape = value.shape
    try:
        if not value.contiguous:
            raise NotReadable("holds a tensor whose dims lie in another order")
        return flat_tensor([value], 0, shape)
    except NotReadable as error:
        raise refuse(WEIGHTS_FILE_READABLE, f"{file} {error}") from error


def _step(room: Path, state: dict[str, Any]) -> int | None:
    file = room / "step.pt"
    if file.is_file():
        content = read_file(file)
        if isinstance(content, dict):
            content = cast("dict[str, Any]", content).get("param")
        return number_in(content)
    steps = state.get("global_steps")
    return steps if isinstance(steps, int) else None
