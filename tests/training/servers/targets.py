"""What ranks of a test of parameter servers do: a few steps, and tell what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.proof.oracle.batches import global_batch
from echelon.training.subject import build

Held = Mapping[str, list[tuple[tuple[int, ...], torch.Tensor]]]


def final_parameters(context: RankContext, argument: Any) -> Held:
    """Take steps, and return the parameters of this rank: name -> (offset, values)."""
    plan = Plan.from_json(argument["plan"])
    subject = build(context, plan)
    try:
        for step in range(argument["steps"]):
            subject.step(global_batch(plan, step), step)
    finally:
        subject.close()
    return {
        name: [(shard.offset, shard.tensor.clone()) for shard in shards]
        for name, shards in subject.parameters().items()
    }


def engine_kind(context: RankContext, argument: Any) -> str:
    """Return the name of the class of this rank's engine."""
    subject = build(context, Plan.from_json(argument["plan"]))
    name = type(subject.engine).__name__
    subject.close()
    return name
