"""A run whose weights matter, made here, and the folders of other tools with the same weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from echelon.config.load import load_job
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.version import __version__
from echelon.parallel.storage.weights import Shard
from echelon.telemetry.run_directory import create_run
from echelon.training.checkpoint.folder import checkpoint_path
from echelon.training.checkpoint.index import (
    INDEX_FILE,
    PARAMETERS,
    STATE_FILE,
    CheckpointFileEntry,
    CheckpointIndex,
    TensorEntry,
)
from echelon.training.checkpoint.shard_file import write_shard_file
from echelon.training.weights.trainers.contents import MOMENTS

STEP = 7
_RANKS = 2
_KINDS = (PARAMETERS, *(f"optimizer.{kind}" for kind in MOMENTS))

LORA = "-lora"
_ADAPTERS = ("lora.rank=16", 'lora.targets="all-linear"', 'train.weights="."')
# As nano has them, embedding and head are one tensor. In fp32:
SIZES: dict[str, dict[str, object]] = {
    # 321 MB: the embedding has 201 MB, a layer 60 MB.
    "large": {"vocab": 49_152, "hidden": 1024, "ffn": 3840, "layers": 2},
    # 348 MB: gate and up are one tensor of 201 MB in other tools.
    "wide": {"vocab": 8192, "hidden": 1024, "ffn": 24_576, "layers": 1},
    # 44 MB and 56 MB: what tests have time for.
    "small": {"vocab": 12_288, "hidden": 512, "ffn": 1024, "layers": 2},
    "small-wide": {"vocab": 1024, "hidden": 512, "ffn": 8192, "layers": 1},
    "warm": {"vocab": 320, "hidden": 64, "ffn": 128, "layers": 2},
}


def make_run(home: Path, size: str) -> Path:
    """Make a run whose checkpoint has weights and what Adam keeps of them; return its folder.

    With LORA behind the size it trained adapters.
    """
    plain = size.removesuffix(LORA)
    values = {**SIZES[plain], "heads": 8, "kv_heads": 4, "max_positions": 16}
    settings = [f"model.{key}={value}" for key, value in values.items()]
    settings += list(_ADAPTERS) if size != plain else []
    job = load_job("nano", [*settings, "batch.sequence_length=16", 'precision.parameters="fp32"'])
    run = create_run(home, size, name_was_given=True, plan=job.plan, run_toml="", environment={})
    write_checkpoint(run.checkpoints, job.plan.model)
    return run.path


def write_checkpoint(directory: Path, shape: ModelShape) -> Path:
    """Write a checkpoint of two ranks, each with half of the rows of each tensor."""
    folder = checkpoint_path(directory, STEP)
    folder.mkdir(parents=True)
    tensors: dict[str, dict[str, TensorEntry]] = {kind: {} for kind in _KINDS}
    files: dict[str, CheckpointFileEntry] = {}
    for rank in range(_RANKS):
        shards = {kind: _shards(shape, rank) for kind in _KINDS}
        written = write_shard_file(folder, f"rank-{rank:04d}.safetensors", shards)
        assert written.entry is not None, "each rank has shards"
        files[written.file] = written.entry
        for one in written.shards:
            there = tensors[one.kind].get(one.name)
            pieces = () if there is None else there.pieces
            tensors[one.kind][one.name] = TensorEntry(
                dtype=one.dtype, shape=one.global_shape, pieces=(*pieces, one.entry)
            )
    state = json.dumps({"step": STEP}).encode()
    (folder / STATE_FILE).write_bytes(state)
    files[STATE_FILE] = CheckpointFileEntry(
        size_bytes=len(state), sha256=hashlib.sha256(state).hexdigest()
    )
    index = CheckpointIndex(
        step=STEP,
        world_size=_RANKS,
        echelon_version=__version__,
        plan_hash="",
        model_hash="",
        tokenizer_hash="",
        mathematics={},
        files=files,
        tensors=tensors,
    )
    (folder / INDEX_FILE).write_text(index.to_text(), encoding="utf-8")
    return folder


def _shards(shape: ModelShape, rank: int) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for place, spec in enumerate(parameters(shape)):
        half = spec.shape[0] // _RANKS
        rows = half if rank == 0 else spec.shape[0] - half
        # One value a tensor takes no memory; to read and to write it takes what others take.
        value = torch.tensor(0.5 + place).expand(rows, *spec.shape[1:])
        offset = (half * rank, *(0 for _ in spec.shape[1:]))
        shard = Shard(
            name=spec.name, global_shape=spec.shape, offset=offset, tensor=value, primary=True
        )
        found[spec.name] = [shard]
    return found


def write_zero(folder: Path, exported: Path, stage: int, ranks: int) -> None:
    """Write a folder of DeepSpeed with the weights of one of Hugging Face, without DeepSpeed."""
    from safetensors.torch import load_file

    from tests.training.weights.trainers.folders import deepspeed_zero

    tensors: dict[str, Any] = {}
    for file in sorted(exported.glob("*.safetensors")):
        tensors |= load_file(file)
    deepspeed_zero(folder, tensors, stage, ranks)
