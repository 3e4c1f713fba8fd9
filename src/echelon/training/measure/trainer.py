# SPDX-License-Identifier: Apache-2.0
"""Measure how long the steps of a plan take, and the units of a model on one rank.

Steps are taken on every rank of a pool, by the engine that trains.

For units the model is cut into three stages on one rank: the embedding, one block (blocks are
alike), the head. The executor then runs them as it would in a pipeline, with the run's own kernels,
and every action is timed: F, B and W of each, and BW in passes of their own. A tensor rank is
measured as a model of its own with the heads, inner columns and words that it would have; what
tensor ranks send one another is not in it.

Shape suffixes: B sequences, T positions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, quantiles

import torch
import torch.distributed as dist

from echelon.config.files.measurements import BLOCK, PASSES, UNITS, TimesFile, fitted_settings
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.choices.updates import Updates
from echelon.core.event import EventList, NoEvents
from echelon.core.mesh import Mesh
from echelon.core.plan import Layout, Pipeline, Plan
from echelon.launch.context import RankContext
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.layout.islands import without_losses
from echelon.models.batch import TokenBatch
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.rank_model import RankModel
from echelon.parallel.transport.recorder import Recorder
from echelon.schedule.action import ActionKind
from echelon.schedule.from_plan import schedule_from_plan
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches

MICROBATCHES = 4  # of a step
LEAST_SAMPLES = 12  # times of a unit
STAGE_UNITS = (UNIT_EMBEDDING, BLOCK, UNIT_HEAD)
KIND_OF_PASS: dict[str, ActionKind] = dict(
    zip(PASSES, (ActionKind.F, ActionKind.B, ActionKind.W, ActionKind.BW), strict=True)
)


class _SettledRecorder(Recorder):
    """A recorder whose actions begin and end with nothing left to do on the device."""

    def __init__(self, events: EventList, device: torch.device) -> None:
        super().__init__(0, events)
        self._device = device

    @contextmanager
    def action(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Record what happens inside as one action, its kernels included."""
        self._settle()
        with super().action(kind, stage, microbatch):
            yield
            self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_units(plan: Plan, device: torch.device, *, seconds: float) -> TimesFile:
    """Return the times of the units of `plan` on `device`, measured for about `seconds`."""
    events = EventList()
    small = unit_plan(plan)
    groups = rank_groups(small, _SettledRecorder(events, device))
    model = apply_plan(small, groups, device)
    batches = _batches(small, device)
    deadline = time.monotonic() + seconds
    rounds = 0
    while (
        rounds == 0
        or time.monotonic() < deadline
        or any(len(_of(events, name, unit)) < LEAST_SAMPLES for name in PASSES for unit in UNITS)
    ):
        for split in (True, False):
            _run(model, with_rows(small, split=split), batches)
        rounds += 1
        if rounds == 1:
            events.events.clear()  # The first round warms up: memory, caches, kernels.
    return TimesFile(
        model=plan.model.name,
        fits=fitted_settings(plan),
        seconds={
            unit: {name: median(_of(events, name, unit)) for name in PASSES} for unit in UNITS
        },
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        spread={unit: _spread(events, unit) for unit in UNITS},
    )


def unit_plan(plan: Plan) -> Plan:
    """Return a plan of one rank with three stages: embedding, one block, head.

    The model is what one tensor rank has of the plan's.
    """
    model, tp, experts = plan.model, plan.mesh.tp, plan.model.experts
    if experts is not None:
        pieces = plan.layout.experts.expert_tp
        # Blocks of experts are most of a model that has them.
        experts = replace(experts, ffn=experts.ffn // pieces, first_dense_layers=0)
    one = replace(
        model,
        layers=1,
        heads=model.heads // tp,
        kv_heads=model.kv_heads // tp,
        ffn=model.ffn // tp,
        vocab=-(-model.vocab // tp),
        experts=experts,
    )
    micro = plan.layout.microbatch_sequences
    mathematics = replace(
        plan.mathematics,
        model=one,
        global_sequences=micro * MICROBATCHES,
        # One rank gathers nothing, and has no replicas.
        precision=replace(plan.mathematics.precision, int8_block=0),
        local_sgd=LocalSgd(),
        updates=Updates(),
    )
    layout = Layout(
        mesh=Mesh(),
        microbatch_sequences=micro,
        pipeline=Pipeline(schedule="file", virtual_stages=3, stages=((), (0,), ())),
        kernels=plan.layout.kernels,
    )
    return with_rows(replace(plan, mathematics=mathematics, layout=layout), split=True)


def with_rows(plan: Plan, *, split: bool) -> Plan:
    """Return the plan with one microbatch after the other, B and W apart (or BW)."""
    backward = ("B", "W") if split else ("BW",)
    words = [
        f"{kind}{stage}.{microbatch}"
        for microbatch in range(MICROBATCHES)
        for kinds, stages in ((("F",), (0, 1, 2)), (backward, (2, 1, 0)))
        for stage in stages
        for kind in kinds
    ]
    pipeline = replace(plan.layout.pipeline, rows=(" ".join(words),))
    return replace(plan, layout=replace(plan.layout, pipeline=pipeline))


def _batches(plan: Plan, device: torch.device) -> list[TokenBatch]:
    sequences, length = plan.layout.microbatch_sequences, plan.mathematics.sequence_length
    generator = torch.Generator().manual_seed(plan.mathematics.seed)
    size = (sequences, length + 1)
    found: list[TokenBatch] = []
    for microbatch in range(MICROBATCHES):
        ids = torch.randint(plan.model.vocab, size, generator=generator)
        samples = torch.arange(sequences) + microbatch * sequences
        rows = (ids[:, :-1].to(device), ids[:, 1:].to(device), samples.to(device))
        found.append(TokenBatch.from_rows(*rows, step=1, seed=plan.mathematics.seed))
    return found


def _run(model: RankModel, plan: Plan, batches: list[TokenBatch]) -> None:
    tokens = sum(batch.num_valid() for batch in batches)
    model.store.start_step()
    model.reduction.start_step()
    model.executor.run(schedule_from_plan(plan), batches, 1.0 / tokens)
    model.reduction.finish()
    model.gathering.end_pass()


def _of(events: EventList, name: str, unit: str) -> list[float]:
    """Return the seconds of a pass of a unit; the first microbatch is a warm-up."""
    wanted = KIND_OF_PASS[name].value, STAGE_UNITS.index(unit)
    return [e.end - e.start for e in events.events if e.microbatch and (e.kind, e.stage) == wanted]


def _spread(events: EventList, unit: str) -> float:
    """Return the distance of the quartiles of F of a unit over its median."""
    found = _of(events, PASSES[0], unit)
    low, _, high = quantiles(found, n=4)
    return (high - low) / median(found)


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
