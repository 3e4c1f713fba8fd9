# SPDX-License-Identifier: Apache-2.0
"""Older folders of Megatron-core: a file for each tensor rank and pipeline stage.

`mp_rank_01_002/model_optim_rng.pt` is of tensor rank 1 in stage 2, `mp_rank_01` where there are no
stages. Each counts its own layers from 0; with virtual stages it has `model0`, `model1` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from echelon.core.disk import list_names
from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.weights import WEIGHTS_FILE_READABLE, WEIGHTS_RANKS_COMPLETE
from echelon.interop.weight_names.megatron import LAYERS
from echelon.training.weights.pickles import NotReadable, PickledTensor
from echelon.training.weights.stored import DTYPE_SIZES, StoredBlock, StoredTensor, matrix
from echelon.training.weights.trainers.contents import (
    TrainerCheckpoint,
    refuse,
    some,
    stored_tensor,
)
from echelon.training.weights.trainers.deepspeed import read_file

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_\d+)?")

BY_COLUMNS = (".linear_proj.weight", ".linear_fc2.weight")
"""Matrices whose columns tensor ranks share out."""
BY_ROWS = (".linear_qkv.weight", ".linear_qkv.bias", ".linear_fc1.weight", ".linear_fc1.bias")
BY_WORDS = ("word_embeddings.weight", "output_layer.weight")
GATED = (".linear_fc1.weight", ".linear_fc1.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Hold the tensors of one stage, of each tensor rank."""

    ranks: Sequence[Mapping[str, PickledTensor]]

    @property
    def num_layers(self) -> int:
        """Return the number of its layers."""
        found = {
            int(key.removeprefix(LAYERS).partition(".")[0])
            for key in self.ranks[0]
            if key.startswith(LAYERS)
        }
        return max(found, default=-1) + 1


def rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the folders of tensor ranks and stages in one of an iteration."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match:
            found[int(match[1]), int(match[2] or 0)] = path
    return found


def read_megatron(folder: Path, shape: ModelShape) -> TrainerCheckpoint:
    """Return what the folder of one iteration holds."""
    places = rank_folders(folder)
    tp = 1 + max(rank for rank, _ in places)
    pp = 1 + max(stage for _, stage in places)
    every = [(rank, stage) for stage in range(pp) for rank in range(tp)]
    lacking = [key for key in every if not (places.get(key, folder) / FILE).is_file()]
    if lacking:
        names = [f"tensor rank {rank} of stage {stage}" for rank, stage in lacking]
        raise refuse(
            WEIGHTS_RANKS_COMPLETE,
            f"{folder} lacks the {FILE} of {some(names)}: {list_names(folder)}",
        )
    contents = {key: read_file(places[key] / FILE) for key in every}
    weights: dict[str, StoredTensor] = {}
    before = 0
    try:
        for stage in _stages(contents, tp, pp):
            for key, tensor in _merged(stage, shape.gated):
                weights[_counted(key, before)] = tensor
            before += stage.num_layers
    except (NotReadable, AttributeError, KeyError, TypeError, ValueError) as error:
        raise refuse(
            WEIGHTS_FILE_READABLE, f"{folder} is not what Megatron-core writes: {error}"
        ) from error
    step = contents[0, 0].get("iteration")
    return TrainerCheckpoint(
        told=f"a folder of Megatron-core, tp {tp} x pp {pp}",
        weights=weights,
        step=step if isinstance(step, int) else None,
    )


def _stages(contents: Mapping[tuple[int, int], Any], tp: int, pp: int) -> Iterator[_Stage]:
    """Yield the stages in the order in which layers pass them: virtual ones in turns."""
    first = contents[0, 0]
    names = [key for key in first if re.fullmatch(r"model\d+", key)] or ["model"]
    for name in sorted(names, key=lambda one: int(one.removeprefix("model") or 0)):
        for stage in range(pp):
            yield _Stage(ranks=[_tensors(contents[rank, stage][name]) for rank in range(tp)])


def _tensors(module: Mapping[str, Any]) -> dict[str, PickledTensor]:
    return {
        key.removeprefix("module."): cast("PickledTensor", value)
        for key, value in module.items()
        if isinstance(value, PickledTensor) and not key.endswith("_extra_state")
    }


def _counted(key: str, before: int) -> str:
    """Return a key with its layer counted from the first of the model on."""
    if not key.startswith(LAYERS):
        return key
    layer, _, rest = key.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{int(layer) + before}.{rest}"


def _merged(stage: _Stage, gated: bool) -> Iterator[tuple[str, StoredTensor]]:
    for key, first in stage.ranks[0].items():
        parts = [stored_tensor(rank[key]) for rank in stage.ranks]
        # The experts of a TEGroupedMLP are counted behind the name.
        kind = key.rstrip("0123456789")
        if kind.endswith(BY_COLUMNS):
            yield key, _beside(parts)
        elif kind.endswith((*BY_ROWS, *BY_WORDS)):
            yield key, _below(parts, 2 if gated and kind.endswith(GATED) else 1)
        else:
            yield key, stored_tensor(first)


def _beside(parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return matrices whose columns stand side by side."""
    blocks: list[StoredBlock] = []
    column = 0
    for part in parts:
        blocks.extend(replace(block, column=column) for block in part.blocks)
        column += part.shape[1]
    return StoredTensor(
        dtype=parts[0].dtype, shape=(parts[0].shape[0], column), blocks=tuple(blocks)
    )


def _below(parts: Sequence[StoredTensor], turns: int) -> StoredTensor:
    """Return tensors one below the other; of each `turns` equal pieces, piece by piece."""
    total = sum(part.shape[0] for part in parts)
    blocks: list[StoredBlock] = []
    before = 0
    for part in parts:
        (block,) = part.blocks
        height, width = matrix(part.shape)
        item = DTYPE_SIZES.get(part.dtype, 1)
        size = height // turns
        blocks.extend(
            replace(
                block,
                start=block.start + turn * size * width * item,
                row=turn * (total // turns) + before,
                height=size,
            )
            for turn in range(turns)
        )
        before += size
    return StoredTensor(
        dtype=parts[0].dtype, shape=(total, *parts[0].shape[1:]), blocks=tuple(blocks)
    )
