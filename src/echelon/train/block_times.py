"""Measure how long the units of a model take on one rank of this machine.

The model is cut into three stages on one rank: the embedding, one block (blocks are alike), the
head. The executor then runs them as it would in a pipeline, with the run's own kernels, and every
action is timed: F, B and W of each, and BW in passes of their own. A tensor rank is measured as a
model of its own with the heads, inner columns and words that it would have; what tensor ranks send
one another is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, quantiles

import torch

from echelon.config.times_file import BLOCK, PASSES, UNITS, TimesFile, fitted
from echelon.core.event import Event
from echelon.core.mesh import Mesh
from echelon.core.plan import Context, Pipeline, Plan, Recompute, Zero
from echelon.cost.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.models.batch import TokenBatch
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import Wanted, rank_groups
from echelon.parallel.rank_model import RankModel
from echelon.parallel.recorder import Recorder
from echelon.schedule.action import ActionKind
from echelon.schedule.of_plan import schedule_of

MICROBATCHES = 4
LEAST_SAMPLES = 12
STAGE_UNITS = (UNIT_EMBEDDING, BLOCK, UNIT_HEAD)
KIND_OF_PASS: dict[str, ActionKind] = dict(
    zip(PASSES, (ActionKind.F, ActionKind.B, ActionKind.W, ActionKind.BW), strict=True)
)


@dataclass(slots=True)
class _Samples:
    """Collect the seconds of every action by kind and stage; the first microbatch is a warm-up."""

    seconds: dict[tuple[str, int], list[float]]

    def record(self, event: Event) -> None:
        """Keep one action."""
        if event.stage is not None and event.microbatch:
            self.seconds.setdefault((event.kind, event.stage), []).append(event.end - event.start)


class _SettledRecorder(Recorder):
    """A recorder whose actions begin and end with nothing left to do on the device."""

    def __init__(self, samples: _Samples, device: torch.device) -> None:
        super().__init__(0, samples)
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
    samples = _Samples({})
    small = unit_plan(plan)
    groups = rank_groups(small.mesh, _SettledRecorder(samples, device), Wanted.by(small))
    model = apply_plan(small, groups, device)
    batches = _batches(small, device)
    deadline = time.monotonic() + seconds
    rounds = 0
    while rounds == 0 or _fewest(samples) < LEAST_SAMPLES or time.monotonic() < deadline:
        for split in (True, False):
            _run(model, with_rows(small, split=split), batches)
        rounds += 1
        if rounds == 1:
            samples.seconds.clear()  # The first round warms up: memory, caches, kernels.
    return TimesFile(
        model=plan.model.name,
        fits=fitted(plan),
        seconds={
            unit: {name: median(_of(samples, name, unit)) for name in PASSES} for unit in UNITS
        },
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        spread={unit: _spread(samples, unit) for unit in UNITS},
    )


def unit_plan(plan: Plan) -> Plan:
    """Return a plan of one rank with three stages: embedding, one block, head.

    The model is what one tensor rank has of the plan's.
    """
    model, tp = plan.model, plan.mesh.tp
    one = replace(
        model,
        layers=1,
        heads=model.heads // tp,
        kv_heads=model.kv_heads // tp,
        ffn=model.ffn // tp,
        vocab=-(-model.vocab // tp),
    )
    micro = plan.layout.microbatch_sequences
    mathematics = replace(plan.mathematics, model=one, global_sequences=micro * MICROBATCHES)
    layout = replace(
        plan.layout,
        mesh=Mesh(),
        sequence_parallel=False,
        zero=Zero(),
        recompute=Recompute(),
        context=Context(),
        pipeline=Pipeline(schedule="file", virtual_stages=3, stages=((), (0,), ())),
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
    model.executor.run(schedule_of(plan), batches, 1.0 / tokens)
    model.reduction.finish()
    model.residency.end_pass()


def _of(samples: _Samples, name: str, unit: str) -> list[float]:
    return samples.seconds.get((KIND_OF_PASS[name].value, STAGE_UNITS.index(unit)), [])


def _fewest(samples: _Samples) -> int:
    return min(len(_of(samples, name, unit)) for name in PASSES for unit in UNITS)


def _spread(samples: _Samples, unit: str) -> float:
    """Return the distance of the quartiles of F of a unit over its median."""
    found = _of(samples, PASSES[0], unit)
    low, _, high = quantiles(found, n=4)
    return (high - low) / median(found)
