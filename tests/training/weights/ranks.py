"""What ranks run in the tests of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from echelon.core.event import EventList
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Plan, Precision, Zero
from echelon.launch.context import RankContext
from echelon.parallel.storage.weights import Shard
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights

LARGE = ModelShape(
    name="large",
    layers=3,
    hidden=512,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn=2048,
    vocab=16384,
    max_positions=16,
)
"""115 MB in fp32: much beside the buffers of a process, little beside a disk."""


def mixed(plan: Plan, stage: int) -> Plan:
    """Return a plan in bf16 with fp32 masters, at a stage of ZeRO."""
    zero = Zero(stage=3 if stage == 3 else 1 if stage else 0, bucket_bytes=4096)
    precision = Precision(parameters="bf16", gradients="fp32", reduction="fp32", master="fp32")
    return replace(
        plan,
        mathematics=replace(plan.mathematics, precision=precision),
        layout=replace(plan.layout, zero=zero),
    )


def load(context: RankContext, argument: tuple[Plan, Path]) -> list[Shard]:
    """Load weights as a run does; return copies of the masters and of the parameters."""
    plan, path = argument
    engine = TrainEngine(plan, Recorder(context.rank, EventList()), context.device)
    weights = find_weights(path, plan.model)
    load_weights(weights, engine.masters(), engine.groups.world)
    engine.resume(engine.position())
    held = [*engine.masters().values(), *engine.parameters().values()]
    copies = [replace(shard, tensor=shard.tensor.clone()) for shards in held for shard in shards]
    engine.close()
    return copies


def slice_of(dim: int) -> tuple[dict[str, list[Shard]], int]:
    """Return the last quarter of each tensor of LARGE along a dim, empty, and the bytes of all."""
    wanted: dict[str, list[Shard]] = {}
    for spec in parameters(LARGE):
        cut = min(dim, len(spec.shape) - 1)
        part = max(1, spec.shape[cut] // 4)
        shape = [part if index == cut else size for index, size in enumerate(spec.shape)]
        offset = tuple(whole - here for whole, here in zip(spec.shape, shape, strict=True))
        tensor = torch.empty(shape)
        wanted[spec.name] = [
            Shard(
                name=spec.name,
                global_shape=spec.shape,
                offset=offset,
                tensor=tensor,
                primary=True,
            )
        ]
    return wanted, sum(one.tensor.nbytes for shards in wanted.values() for one in shards)
