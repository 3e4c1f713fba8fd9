"""Rectangles of tensors, read from files of weights by themselves, beside the whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights


def require_rectangles(
    folder: Path,
    shape: ModelShape,
    whole: Mapping[str, torch.Tensor],
    random: Random,
    count: int,
    buffer_bytes: int = TRAINING_PIECES.buffer_bytes,
) -> None:
    """Read `count` rectangles of each weight; each must be that part of the `whole` tensor."""
    sizes = replace(TRAINING_PIECES, buffer_bytes=buffer_bytes)
    wanted: dict[str, list[Shard]] = {}
    for spec in parameters(shape):
        for _ in range(count):
            places = [sorted(random.sample(range(size + 1), 2)) for size in spec.shape]
            shard = Shard(
                name=spec.name,
                global_shape=spec.shape,
                offset=tuple(start for start, _ in places),
                tensor=torch.full([stop - start for start, stop in places], 7.0),
                primary=False,
            )
            wanted.setdefault(spec.name, []).append(shard)
    load_weights(find_weights(folder, shape), wanted, SingleRankCommunicator(), sizes)
    for name, shards in wanted.items():
        for shard in shards:
            at = tuple(
                slice(start, start + size)
                for start, size in zip(shard.offset, shard.tensor.shape, strict=True)
            )
            assert torch.equal(shard.tensor, whole[name][at])
