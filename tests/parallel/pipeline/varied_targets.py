"""A step on microbatches of different lengths, and an evaluation after it, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """What a rank computed; `sent` are the name and the bytes of each message of the step."""

    loss: float
    evaluated: float
    gradients: dict[str, torch.Tensor]
    sent: list[tuple[str, int]]


def train(context: RankContext, argument: tuple[Plan, tuple[int, ...]]) -> Varied:
    """Take a step on one microbatch of each length, whatever the number of the plan's is.

    Gradients are those of whole parameters: there must be one data and one tensor rank.
    """
    plan, lengths = argument
    events = EventList()
    engine = TrainEngine(plan, Recorder(context.rank, events), context.device)
    gradients: dict[str, torch.Tensor] = {}

    def keep() -> None:
        for name, shards in engine.gradients().items():
            gradients[name] = shards[0].tensor.clone()

    engine.on_gradients = keep
    batches = [_batch(plan, microbatch, length) for microbatch, length in enumerate(lengths)]
    result = engine.step(batches, 0)
    sent = [(one.name, one.bytes) for one in events.events if one.kind == "send"]
    return Varied(
        loss=result.loss, evaluated=engine.evaluate(batches), gradients=gradients, sent=sent
    )


def _batch(plan: Plan, microbatch: int, length: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(microbatch)
    shape = (plan.layout.microbatch_sequences, length + 1)
    tokens = torch.randint(plan.model.vocab, shape, generator=generator)
    ids = torch.arange(shape[0]) + microbatch * shape[0]
    return TokenBatch.from_rows(tokens[:, :-1], tokens[:, 1:], ids, seed=plan.mathematics.seed)
