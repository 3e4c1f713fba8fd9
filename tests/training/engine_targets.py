"""What ranks run in the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.steps.part import StepResult
from echelon.training.subject import rank_batches
from tests.parallel.one_device import Rows, make_rows
from tests.parallel.targets import Shards, copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """The steps around one with a NaN, and what a rank held before and after it."""

    results: list[StepResult]
    before: Shards
    after: Shards
    moments: tuple[list[torch.Tensor], list[torch.Tensor]]


def make_engine(context: RankContext, plan: Plan) -> TrainEngine:
    """Return this rank's engine."""
    return TrainEngine(plan, Recorder(context.rank, EventList()), context.device)


def batches_of(engine: TrainEngine, step: int) -> list[TokenBatch]:
    """Return the microbatches of this rank in a step."""
    return rank_batches(engine.plan, make_rows(engine.plan, step), engine.data_rank, step)


def moments_of(engine: TrainEngine) -> list[torch.Tensor]:
    """Return copies of all moments."""
    return [one.clone() for kind in engine.optimizer.state().values() for one in kind.values()]


def poison(context: RankContext, argument: tuple[Plan, str, int]) -> Poisoned:
    """Take a step, one in which a rank has a NaN in the loss or an infinite gradient, one more."""
    plan, where, culprit = argument
    engine = make_engine(context, plan)
    results = [engine.step(batches_of(engine, 0), 0)]
    before, first = copies(engine.parameters()), moments_of(engine)
    operations: Any = next(iter(engine.model.stages.values())).operations
    mine = context.rank == culprit
    if mine and where == "loss":
        head_loss = operations.head_loss

        def broken(*arguments: Any) -> torch.Tensor:
            return head_loss(*arguments) * float("nan")

        operations.head_loss = broken
    if mine and where == "gradient":
        engine.on_gradients = partial(spoil, engine)
    results.append(engine.step(batches_of(engine, 1), 1))
    after, second = copies(engine.parameters()), moments_of(engine)
    engine.on_gradients = None
    vars(operations).pop("head_loss", None)
    results.append(engine.step(batches_of(engine, 2), 2))
    return Poisoned(results=results, before=before, after=after, moments=(first, second))


def spoil(engine: TrainEngine) -> None:
    """Make one gradient infinite."""
    engine.model.buckets[0].gradient_slice[0] = float("inf")


def evaluate(context: RankContext, plan: Plan) -> tuple[float, float, Shards]:
    """Evaluate step 0's batch, then half of the microbatches of step 1's; return parameters."""
    engine = make_engine(context, plan)
    loss = engine.evaluate(batches_of(engine, 0))
    half = engine.evaluate(batches_of(engine, 1)[: plan.num_microbatches // 2])
    return loss, half, copies(engine.parameters())


def ask_to_stop(context: RankContext, argument: tuple[Plan, Sequence[int]]) -> list[int]:
    """Take two steps; in the second, some ranks ask to stop."""
    plan, asking = argument
    engine = make_engine(context, plan)
    return [
        engine.step(
            batches_of(engine, step), step, stop_requested=step == 1 and context.rank in asking
        ).stop_requests
        for step in range(2)
    ]


def microbatch_losses(context: RankContext, plan: Plan) -> StepResult:
    """Take one step."""
    engine = make_engine(context, plan)
    return engine.step(batches_of(engine, 0), 0)


def one_against_three(context: RankContext, plan: Plan) -> tuple[StepResult, Shards]:
    """Take one step in which data rank 0 counts one of its three samples, rank 1 all three."""
    engine = make_engine(context, plan)
    kept: list[Shards] = []
    engine.on_gradients = lambda: kept.append(copies(engine.gradients()))
    rows = without_two(make_rows(plan, 0))
    result = engine.step(rank_batches(plan, rows, engine.data_rank, 0), 0)
    return result, kept[0]


def without_two(rows: Rows) -> Rows:
    """Return rows of which the second and the third have no label that counts."""
    labels_BT = rows.labels_BT.clone()
    labels_BT[1:3] = IGNORED_LABEL
    return replace(rows, labels_BT=labels_BT)


def no_tokens(context: RankContext, plan: Plan) -> tuple[Shards, Shards, float, float]:
    """Take a step on a batch in which every label is ignored."""
    engine = make_engine(context, plan)
    batches = [
        replace(batch, labels_N=torch.full_like(batch.labels_N, IGNORED_LABEL))
        for batch in batches_of(engine, 0)
    ]
    before = copies(engine.parameters())
    result = engine.step(batches, 0)
    return before, copies(engine.parameters()), result.loss, result.grad_norm


def close_without_a_peer(context: RankContext, plan: Plan) -> list[str]:
    """Close an engine whose gather has no end; return what its places say when used."""
    engine = make_engine(context, plan)
    bucket = engine.model.buckets[0]
    places = [
        (engine.optimizer.store, f"{bucket.name}.exp_avg"),
        (bucket.offload_store, bucket.values_key),
    ]

    def gone() -> None:
        raise RuntimeError("connection closed by peer")

    said: list[str] = []
    engine.model.gathering.settle = gone
    engine.close()
    for rest, key in places:
        assert rest is not None, "the slices of this plan rest in files"
        try:
            rest.view(key)
        except KeyError:
            said.append("closed")
    return said
