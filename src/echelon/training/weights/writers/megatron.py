# SPDX-License-Identifier: Apache-2.0
"""Weights as a folder of Megatron-core: distributed (torch_dist), or a file for each rank.

The first has no layout: all layers of a kind stand in one tensor, a chunk for each. The older one
is cut for tensor ranks and stages when it is written.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.core.disk import disk_errors
from echelon.core.model_shape import ModelShape
from echelon.interop.hugging_face.folder import FolderTensor
from echelon.interop.weight_names.megatron import EMBEDDING_KEY, HEAD_KEY, LAYERS
from echelon.training.weights.export import StoredModel, filled
from echelon.training.weights.trainers.megatron import (
    BY_COLUMNS,
    BY_ROWS,
    BY_WORDS,
    FILE,
    GATED,
)
from echelon.training.weights.writers.archive import OpenArchive
from echelon.training.weights.writers.distributed import Chunk, write_distributed
from echelon.training.weights.writers.shares import FolderPart, TensorRoom, Writers

POINTER = "latest_checkpointed_iteration.txt"
_VERSION = 3.0
"""Of what Megatron-LM looks for first: q, k and v lie by key/value head."""
_WITH_EXTRA_STATE = (
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
)
_OF_MLP = ("linear_fc1", "linear_fc2")
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFolder:
    """Say what is written: the tensors of a model after so many updates."""

    shape: ModelShape
    tensors: Sequence[FolderTensor]
    model: StoredModel
    dtype: torch.dtype
    step: int

    @property
    def iteration(self) -> str:
        """Return how the folder of the step is called."""
        return f"iter_{self.step:07d}"

    def make(self, tensor: FolderTensor) -> torch.Tensor:
        """Return a tensor, whole."""
        return filled(self.model, tensor, self.dtype)


def write_torch_dist(found: MegatronFolder, root: Path, writers: Writers) -> None:
    """Write a folder that Megatron-core reads at any layout; all ranks call it."""
    folder = root / found.iteration
    writers.on_first(lambda: _make_folder(folder))
    chunks = [_chunk(found, tensor) for tensor in found.tensors]
    write_distributed(chunks, folder, found.dtype, writers, _extra_states(found.shape))
    writers.on_first(lambda: _write_common(found, folder, root))


def _make_folder(folder: Path) -> None:
    with disk_errors(f"to write into {folder.parent}"):
        folder.mkdir(parents=True)


def _write_common(found: MegatronFolder, folder: Path, root: Path) -> None:
    with disk_errors(f"to write into {root}"):
        torch.save(_common(found.step), folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(_BACKENDS), encoding="utf-8")
        (root / POINTER).write_text(str(found.step), encoding="utf-8")


def _extra_states(shape: ModelShape) -> dict[str, bytes]:
    """Return what layers keep beside weights, scales of fp8: none, and looked for all the same."""
    nothing = io.BytesIO()
    torch.save([None], nothing)
    return {key: nothing.getvalue() for key in _keys_of_extra_states(shape)}


def _keys_of_extra_states(shape: ModelShape) -> Iterator[str]:
    experts, count = shape.experts, shape.layers
    plain = [*_WITH_EXTRA_STATE, *(f"mlp.{name}" for name in _OF_MLP if experts is None)]
    if experts is not None and experts.shared_experts:
        plain += [f"mlp.shared_experts.{name}" for name in _OF_MLP]
    for layer in range(count):
        for module in plain:
            yield f"{LAYERS}{module}._extra_state/shard_{layer}_{count}"
        for expert in range(0 if experts is None else experts.num_experts):
            assert experts is not None, "it was counted"
            place = f"{layer}.{expert}_{count}.{experts.num_experts}"
            for name in _OF_MLP:
                yield f"{LAYERS}mlp.experts.experts.{name}._extra_state/shard_{place}"


def _common(step: int) -> dict[str, Any]:
    return {"checkpoint_version": _VERSION, "iteration": step}


def _chunk(found: MegatronFolder, tensor: FolderTensor) -> Chunk:
    """Return where a tensor of a layer is in that of all layers."""
    if not tensor.key.startswith(LAYERS):
        return Chunk(
            key=tensor.key,
            whole=tensor.shape,
            offset=(0,) * len(tensor.shape),
            shape=tensor.shape,
            make=lambda: found.make(tensor),
        )
    layer, _, rest = tensor.key.removeprefix(LAYERS).partition(".")
    return Chunk(
        key=f"{LAYERS}{rest}",
        whole=(found.shape.layers, *tensor.shape),
        offset=(int(layer), *(0 for _ in tensor.shape)),
        shape=(1, *tensor.shape),
        make=lambda: found.make(tensor).unsqueeze(0),
    )


def write_ranks(found: MegatronFolder, root: Path, tp: int, pp: int, writers: Writers) -> None:
    """Write a file for each of `tp` tensor ranks in each of `pp` stages, both of which divide.

    All ranks call it; each writes the files of some stages, for a tensor is cut for all of one.
    """
    folder = root / found.iteration
    writers.on_first(lambda: _make_folder(folder))
    writers.write([_stage_part(found, folder, stage, tp, pp) for stage in range(pp)])
    writers.on_first(lambda: _write_pointer(found, root))


def _write_pointer(found: MegatronFolder, root: Path) -> None:
    with disk_errors(f"to write into {root}"):
        (root / POINTER).write_text(str(found.step), encoding="utf-8")


def _stage_part(found: MegatronFolder, folder: Path, stage: int, tp: int, pp: int) -> FolderPart:
    """Return the files of a stage as what one thread writes."""
    held = _of_stage(found, stage, pp)
    sizes = {key: tensor.numel * found.dtype.itemsize for key, tensor in held.items()}

    def write(room: TensorRoom) -> None:
        archives = [
            _open_rank(found, folder / _rank_folder(rank, stage, pp), held, tp)
            for rank in range(tp)
        ]
        for key, tensor in held.items():
            cut = _cutter(key, found.shape.gated, tp)
            with room.hold(sizes[key]):
                whole = found.make(tensor)
                for rank, archive in enumerate(archives):
                    archive.write(key, *cut(whole, rank))
                del whole
        for archive in archives:
            archive.flush()

    return FolderPart(
        name=f"stage {stage}",
        file=f"stage {stage}",
        num_bytes=sum(sizes.values()),
        largest=max(sizes.values()),
        write=write,
    )


def _rank_folder(rank: int, stage: int, pp: int) -> str:
    return f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")


def _open_rank(
    found: MegatronFolder, folder: Path, held: Mapping[str, FolderTensor], tp: int
) -> OpenArchive:
    """Make the file of a rank, without values."""
    with disk_errors(f"to write into {folder.parent}"):
        folder.mkdir(parents=True)
    return OpenArchive(
        folder / FILE,
        {key: (_cut_shape(key, one.shape, tp), found.dtype) for key, one in held.items()},
        lambda made: {**_common(found.step), "model": made},
        lambda read: read["model"],
        found.model.sizes,
    )


def _of_stage(found: MegatronFolder, stage: int, pp: int) -> Mapping[str, FolderTensor]:
    """Return the tensors of a stage by its own names: it counts its layers from 0."""
    return dict(_named(found, stage, pp))


def _named(found: MegatronFolder, stage: int, pp: int) -> Iterator[tuple[str, FolderTensor]]:
    count = found.shape.layers // pp
    first, last = stage == 0, stage == pp - 1
    for tensor in found.tensors:
        if tensor.key.startswith(LAYERS):
            layer, _, rest = tensor.key.removeprefix(LAYERS).partition(".")
            if int(layer) // count == stage:
                yield f"{LAYERS}{int(layer) % count}.{rest}", tensor
        elif tensor.key.startswith("embedding."):
            if first:
                yield tensor.key, tensor
            if last and not first and found.shape.tied and tensor.key == EMBEDDING_KEY:
                # The last stage has a copy of it for the head.
                yield HEAD_KEY, tensor
        elif last:
            yield tensor.key, tensor


Cut = Callable[[torch.Tensor, int], Sequence[torch.Tensor]]
"""What gives a tensor rank its part of a tensor: pieces of it that follow one another."""


def _cutter(key: str, gated: bool, tp: int) -> Cut:
    if key.endswith(BY_COLUMNS):
        return lambda whole, rank: [whole.chunk(tp, dim=1)[rank]]
    if gated and key.endswith(GATED):
        return lambda whole, rank: [half.chunk(tp, dim=0)[rank] for half in whole.chunk(2, dim=0)]
    if key.endswith((*BY_ROWS, *BY_WORDS)):
        return lambda whole, rank: [whole.chunk(tp, dim=0)[rank]]
    return lambda whole, _: [whole]


def _cut_shape(key: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if key.endswith(BY_COLUMNS):
        return shape[0], shape[1] // tp
    if key.endswith((*BY_ROWS, *BY_WORDS)):
        return shape[0] // tp, *shape[1:]
    return shape
