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
from echelon.parallel.recorder import Recorder
from echelon.train.engine import TrainEngine
from echelon.train.subject import rank_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsJob:
    """Say which plan takes steps: some to warm up, then those that are timed."""

    plan: Plan
    warmup: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """Give the seconds of a step on one rank, the median, and the processor's part of the mean."""

    step_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A whole global batch, as `rank_batches` reads it."""

    sample_ids: tuple[int, ...]
    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor
    documents: None = None


def take_steps(context: RankContext, job: StepsJob) -> RankSteps:
    """Build this rank's part of a plan and time its steps; all ranks begin each together."""
    torch.set_num_threads(1)
    plan = job.plan
    recorder = Recorder(context.rank, NoEvents(), context.progress)
    engine = TrainEngine(plan, recorder, context.device)
    ids = torch.randint(
        plan.model.vocab,
        (plan.mathematics.global_sequences, plan.mathematics.sequence_length + 1),
        generator=torch.Generator().manual_seed(0),
    )
    rows = _Rows(sample_ids=tuple(range(len(ids))), inputs_BT=ids[:, :-1], labels_BT=ids[:, 1:])
    seconds: list[float] = []
    processor = 0.0
    for step in range(job.warmup + job.steps):
        runs = engine.runs_of(plan.mathematics.sequence_length)
        batches = rank_batches(plan, rows, engine.data_rank, step, runs=runs)
        context.progress.mark(f"step {step}")
        with context.progress.waits_for("the other ranks"):
            dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        engine.step(batches, step)
        engine.model.residency.settle()
        if step >= job.warmup:
            seconds.append(time.perf_counter() - begin)
            processor += time.process_time() - busy
    engine.close()
    return RankSteps(step_s=median(seconds), cpu_s=processor / job.steps)
