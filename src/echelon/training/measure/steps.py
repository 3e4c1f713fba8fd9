# SPDX-License-Identifier: Apache-2.0
"""Measure the steps of a plan on every rank of a pool, by the engine that trains.

Shape suffixes: B sequences, T positions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.layout.islands import without_losses
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsJob:
    """Say which plan takes steps: some to warm up, then those that are timed."""

    plan: Plan
    warmup: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchRows:
    """A whole global batch, as `rank_batches` reads it."""

    sample_ids: tuple[int, ...]
    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor
    documents: None = None


def take_steps(context: RankContext, job: StepsJob) -> float:
    """Return the median seconds of a step on this rank of a plan; all ranks begin each together."""
    torch.set_num_threads(1)
    plan = without_losses(job.plan)
    recorder = Recorder(context.rank, NoEvents(), context.progress)
    engine = TrainEngine(plan, recorder, context.device)
    ids = torch.randint(
        plan.model.vocab,
        (plan.mathematics.global_sequences, plan.mathematics.sequence_length + 1),
        generator=torch.Generator().manual_seed(0),
    )
    rows = _BatchRows(
        sample_ids=tuple(range(len(ids))), inputs_BT=ids[:, :-1], labels_BT=ids[:, 1:]
    )
    seconds: list[float] = []
    for step in range(job.warmup + job.steps):
        runs = engine.runs_for(plan.mathematics.sequence_length)
        batches = rank_batches(plan, rows, engine.data_rank, step, runs=runs)
        context.progress.mark(f"step {step}")
        with context.progress.waits_for("the other ranks"):
            dist.barrier()
        begin = time.perf_counter()
        engine.step(batches, step)
        engine.model.gathering.settle()
        if step >= job.warmup:
            seconds.append(time.perf_counter() - begin)
    engine.close()
    return median(seconds)
