# SPDX-License-Identifier: Apache-2.0
"""Universal folders of DeepSpeed, which ds_to_universal makes: a folder for each parameter.

`zero/NAME/fp32.pt` holds a parameter, `exp_avg.pt` and `exp_avg_sq.pt` beside it what Adam keeps of
it. Of runs at stage 3 they are flat: the states of the module say their shapes.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, cast

from echelon.core.disk import list_names
from echelon.core.rulebook.weights import WEIGHTS_FILE_READABLE, WEIGHTS_RANKS_COMPLETE
from echelon.training.weights.pickles import NotReadable, PickledTensor
from echelon.training.weights.stored import StoredTensor
from echelon.training.weights.trainers.contents import (
    MOMENTS,
    TrainerCheckpoint,
    refuse,
    some,
)
from echelon.training.weights.trainers.deepspeed import MODEL_FILES, read_file
from echelon.training.weights.trainers.distributed import number_in
from echelon.training.weights.trainers.flat import flat_tensor

PARAMETERS = "zero"
"""The folder of all parameters."""
VALUES = "fp32"


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
