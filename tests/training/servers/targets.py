"""What ranks of a test of parameter servers do: a few steps, and tell what they hold."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.proof.oracle.batches import global_batch
from echelon.training.loop import train_rank
from echelon.training.servers.asynchronous import AsynchronousWorker
from echelon.training.steps.part import StepResult
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


def parameters_to_validate(context: RankContext, argument: Any) -> Held:
    """Take steps, the later the higher the rank, and return what this rank would validate."""
    plan = Plan.from_json(argument["plan"])
    subject = build(context, plan)
    try:
        for step in range(argument["steps"]):
            time.sleep(argument["pause_s"] * context.rank)
            subject.step(global_batch(plan, step), step)
        if argument["validates"]:
            subject.engine.begin_validation(argument["steps"])
        return {
            name: [(shard.offset, shard.tensor.clone()) for shard in shards]
            for name, shards in subject.parameters().items()
        }
    finally:
        subject.close()


def engine_kind(context: RankContext, argument: Any) -> str:
    """Return the name of the class of this rank's engine."""
    subject = build(context, Plan.from_json(argument["plan"]))
    name = type(subject.engine).__name__
    subject.close()
    return name


def train_and_lose(context: RankContext, argument: Any) -> Any:
    """Train as `task` says; rank `rank` is killed before step `step` of its first start.

    Others take their time after that, so that it may come back before the run ends.
    """
    patch = pytest.MonkeyPatch()
    take = AsynchronousWorker.step

    def step(self: AsynchronousWorker, batches: Any, number: int, **named: Any) -> StepResult:
        if number >= argument["step"] and not context.attempt:
            if context.rank == argument["rank"]:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(argument["pause_s"])
        return take(self, batches, number, **named)

    with patch.context() as changed:
        changed.setattr(AsynchronousWorker, "step", step)
        return train_rank(context, argument["task"])
