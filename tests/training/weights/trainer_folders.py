"""Checkpoints of ours that are written as the folders of trainers, and what is read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.index import CheckpointIndex, TensorEntry
from echelon.training.checkpoint.shard_file import write_shard_file
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_moments
from echelon.training.weights.writers.formats import TrainerRequest, planned, write_trainer
from echelon.training.weights.writers.shares import Writers
from tests.training.weights.test_export import Tensors, index_of, stored


def request_of(to: Any, shape: ModelShape, **more: Any) -> TrainerRequest:
    """Return a request for a folder in fp32."""
    plain = {"dtype": "fp32", "model_type": None, "tp": 1, "pp": 1}
    return TrainerRequest(to=to, shape=shape, **{**plain, **more})


def stored_with_moments(
    folder: Path, tensors: Tensors, moments: Mapping[str, Tensors], *, step: int
) -> CheckpointIndex:
    """Write a checkpoint whose weights are cut at random, with moments of an optimizer whole."""
    index = stored(folder, tensors, 5)
    shards = {
        f"optimizer.{kind}": {
            name: [
                Shard(
                    name=name,
                    global_shape=tuple(one.shape),
                    offset=(0,) * one.dim(),
                    tensor=one,
                    primary=True,
                )
            ]
            for name, one in named.items()
        }
        for kind, named in moments.items()
    }
    found = {kind: dict(named) for kind, named in index.tensors.items()}
    for one in write_shard_file(folder, "moments.safetensors", shards).shards:
        found.setdefault(one.kind, {})[one.name] = TensorEntry(
            dtype=one.dtype, shape=one.global_shape, pieces=(one.entry,)
        )
    return replace(index_of(found), step=step)


def written(to: Any, shape: ModelShape, home: Path, index: CheckpointIndex, **more: Any) -> Path:
    """Write the checkpoint `home`/checkpoint as a trainer has it, and return the folder."""
    request = request_of(to, shape, **more)
    out = home / f"out-{to}"
    out.mkdir()
    found = planned(request, index)
    write_trainer(request, found, home / "checkpoint", index, out, Writers(2))
    return out


def moments_back(folder: Path, shape: ModelShape) -> dict[str, Tensors]:
    """Return what an optimizer keeps, read from the folder of a trainer."""
    found = find_weights(folder, shape)
    whole = {
        kind: {spec.name: torch.full(spec.shape, 7.0) for spec in parameters(shape)}
        for kind in found.moments
    }
    wanted = {
        kind: {
            name: [Shard(name=name, global_shape=(), offset=(0,) * t.dim(), tensor=t, primary=True)]
            for name, t in named.items()
        }
        for kind, named in whole.items()
    }
    load_moments(found, wanted, SingleRankCommunicator())
    return whole
