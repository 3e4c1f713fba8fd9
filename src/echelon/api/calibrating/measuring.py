# SPDX-License-Identifier: Apache-2.0
"""What is measured of a machine, each measurement once: what an earlier attempt made is taken.

Kernels run on all ranks of all nodes at once. Collectives run inside of a node, on its first ranks,
and between nodes: of one rank in each, as data and pipeline ranks have them, and of whole nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median

from echelon.api.calibrating.place import JobRanks, MeasuredPlace
from echelon.config.files.measurements import UnfinishedMeasurements, measurement_name
from echelon.core.cluster import Cluster
from echelon.core.plan import Plan
from echelon.cost.fit.runs import TimedStep, TrainerFit, first_devices, fit_trainer, plan_label
from echelon.cost.fit.samples import (
    COLLECTIVES,
    Collective,
    MatmulKernel,
    MeasuredKernel,
    TimedCollective,
    TimedKernel,
    Workload,
)
from echelon.cost.seconds.trainers import our_constants
from echelon.planner.search.request import make_request

JOB_TIMEOUT_S = 1800.0
LEAST_ALONE_FLOPS = 1e6
"""FLOPs of a product from which on running it alone tells how many cores ranks share."""
DEGREES = (2, 4, 8, 16, 32)  # ranks, or nodes

NARROW: Mapping[str, object] = {
    "model.layers": 4,
    "model.hidden": 192,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.ffn": 512,
    "model.vocab": 1024,
    "model.tied": False,
    "batch.sequence_length": 128,
    "batch.global_sequences": 8,
}
WIDE: Mapping[str, object] = {
    **NARROW,
    "model.hidden": 384,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.ffn": 1024,
    "model.vocab": 4096,
    "batch.global_sequences": 4,
}
MIDDLE: Mapping[str, object] = {
    **NARROW,
    "model.hidden": 256,
    "model.ffn": 704,
    "model.vocab": 2048,
    "batch.global_sequences": 4,
}
"""A model of which nothing is fitted."""
SMALL: Mapping[str, object] = {
    **NARROW,
    "model.hidden": 32,
    "model.ffn": 64,
    "model.vocab": 272,
    "batch.sequence_length": 32,
}
"""A model whose steps take a moment."""
PP, DP, REPLICATE, CP, TP = ("mesh.pp", "mesh.dp_shard", "mesh.dp_replicate", "mesh.cp", "mesh.tp")
SP, BATCH, ZERO = "mesh.sequence_parallel", "batch.microbatch_sequences", "zero.stage"
KIND, SCHEDULE = "context.kind", "pipeline.schedule"
FULL_RECOMPUTE: Mapping[str, object] = {"recompute.policy": "full"}
TrainerSplit = tuple[Mapping[str, object], Mapping[str, object]]
SPLITS: tuple[TrainerSplit, ...] = (
    (NARROW, {BATCH: 1}),
    (NARROW, {BATCH: 8}),
    (NARROW, {BATCH: 4}),
    (WIDE, {BATCH: 1}),
    (WIDE, {BATCH: 4}),
    (WIDE, {BATCH: 2, **FULL_RECOMPUTE}),
    (NARROW, {TP: 2, BATCH: 2}),
    (WIDE, {TP: 2, BATCH: 4}),
    (WIDE, {TP: 2, BATCH: 1}),
    (NARROW, {TP: 2, SP: True, BATCH: 2}),
    (WIDE, {TP: 2, SP: True, BATCH: 1}),
    (WIDE, {REPLICATE: 2, BATCH: 2}),
    (WIDE, {DP: 2, ZERO: 2, BATCH: 1}),
    (NARROW, {DP: 2, ZERO: 3, BATCH: 2}),
    (NARROW, {CP: 2, KIND: "ring", BATCH: 4}),
    (WIDE, {CP: 2, KIND: "ulysses", BATCH: 2}),
    (NARROW, {PP: 2, SCHEDULE: "1f1b", BATCH: 2}),
    (WIDE, {PP: 2, SCHEDULE: "zb-h1", BATCH: 1}),
    (WIDE, {TP: 4, SP: True, BATCH: 4}),
    (NARROW, {TP: 4, BATCH: 4}),
    (WIDE, {REPLICATE: 2, TP: 2, SP: True, BATCH: 2}),
    (NARROW, {REPLICATE: 4, BATCH: 2}),
    (WIDE, {DP: 4, ZERO: 3, BATCH: 1}),
    (WIDE, {DP: 4, ZERO: 1, BATCH: 1}),
    (WIDE, {CP: 4, KIND: "ring", BATCH: 2}),
    (NARROW, {PP: 4, SCHEDULE: "1f1b", BATCH: 1}),
    (
        NARROW,
        {PP: 2, REPLICATE: 2, SCHEDULE: "interleaved-1f1b", BATCH: 1, "pipeline.virtual_stages": 2},
    ),
)
HELD_OUT_SPLITS: tuple[TrainerSplit, ...] = (
    (MIDDLE, {BATCH: 2}),
    (MIDDLE, {TP: 2, SP: True, BATCH: 2}),
    (MIDDLE, {DP: 2, ZERO: 3, BATCH: 1}),
    (MIDDLE, {PP: 2, SCHEDULE: "1f1b", BATCH: 1}),
    (MIDDLE, {REPLICATE: 2, TP: 2, BATCH: 1}),
)
"""Plans that are measured and not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Hold what measurements are made with, and those that there are."""

    ranks: JobRanks
    place: MeasuredPlace
    workload: Workload
    done: UnfinishedMeasurements
    say: Callable[[str], None]

    def kernels(self) -> list[TimedKernel]:
        """Return the seconds of all kernels, of some products alone too."""
        place, alone = self.place, list[MatmulKernel]()
        if place.ranks > 1 and place.backend == "gloo" and place.machine.cores is None:
            large = [one for one in self.workload.matmuls if one.flops >= LEAST_ALONE_FLOPS]
            alone = (large or self.workload.matmuls)[::4]
        beside = self.workload.kernels
        return self._kernels(alone, 1) + self._kernels(beside, place.ranks)

    def collectives(self) -> tuple[list[TimedCollective], list[TimedCollective]]:
        """Return the seconds of collectives inside of a node, and of those between nodes."""
        place = self.place
        inside = [*self._sizes((degree, 1) for degree in _degrees(place.ranks))]
        between = [*self._sizes(_groups_of_nodes(place))]
        wanted = [*inside, *between]
        missing = [one for one in wanted if measurement_name(one) not in self.done.found]
        made: dict[Collective, float] = {}
        if missing:
            ranks = ", ".join(map(str, sorted({one.degree for one in missing})))
            self.say(f"measuring {len(missing)} collectives of {ranks} ranks")
            from echelon.training.measure.machine import CollectiveJob, measure_collectives

            job = CollectiveJob(
                collectives=missing,
                window_s=self.workload.window_s,
                threads=place.threads,
                journal=self.done.journal,
            )
            world = place.ranks * place.nodes
            found = self.ranks.run(measure_collectives, job, world, timeout_s=JOB_TIMEOUT_S)[0]
            made = dict(zip(missing, found, strict=True))
        timed = [
            TimedCollective(
                collective=one,
                seconds=made[one] if one in made else self.done.found[measurement_name(one)],
                fitted=one.num_bytes not in self.workload.held_out_sizes,
            )
            for one in wanted
        ]
        return timed[: len(inside)], timed[len(inside) :]

    def _kernels(self, kernels: Sequence[MeasuredKernel], running: int) -> list[TimedKernel]:
        names = {kernel: measurement_name(kernel, running=running) for kernel in kernels}
        missing = [kernel for kernel in kernels if names[kernel] not in self.done.found]
        made: dict[MeasuredKernel, float] = {}
        if missing:
            at_once = f"{running} ranks at once" if running > 1 else "one rank"
            self.say(f"measuring {len(missing)} kernels on {at_once}")
            from echelon.training.measure.machine import KernelJob, measure_kernels

            job = KernelJob(
                kernels=missing,
                dtype=self.place.dtype,
                window_s=self.workload.window_s,
                threads=self.place.threads,
                running=running,
                journal=self.done.journal,
            )
            world = running * self.place.nodes if running == self.place.ranks else running
            found = self.ranks.run(measure_kernels, job, world, timeout_s=JOB_TIMEOUT_S)[0]
            made = dict(zip(missing, found, strict=True))
        cores = self.place.machine.cores
        # A rank's own seconds are those that it would take with a core of its own.
        share = min(1.0, cores / running) if cores else 1.0
        return [
            TimedKernel(
                kernel=kernel,
                seconds=(made[kernel] if kernel in made else self.done.found[names[kernel]])
                / share,
                running=running,
                fitted=kernel not in self.workload.held_out,
            )
            for kernel in kernels
        ]

    def _sizes(self, groups: Iterator[tuple[int, int]]) -> Iterator[Collective]:
        node = self.place.ranks
        for degree, stride in groups:
            for kind in COLLECTIVES:
                if kind == "send" and stride < node < degree:
                    continue  # Neighbours of it are in one node.
                for size in self.workload.sizes:
                    yield Collective(kind=kind, degree=degree, num_bytes=size, stride=stride)


def _degrees(most: int) -> list[int]:
    return sorted({degree for degree in (*DEGREES, most) if 2 <= degree <= most})


def _groups_of_nodes(place: MeasuredPlace) -> Iterator[tuple[int, int]]:
    """Yield degrees and strides: ranks of as many nodes, then all ranks of as many."""
    for nodes in _degrees(place.nodes):
        yield nodes, place.ranks
        if place.ranks > 1:
            yield nodes * place.ranks, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """Say which plans take steps, how many each in a round, and how many rounds.

    Steps of `held_out` plans are measured and not fitted.
    """

    splits: Sequence[TrainerSplit] = SPLITS
    held_out: Sequence[TrainerSplit] = HELD_OUT_SPLITS
    warmup: int = 1
    steps: int = 3
    rounds: int = 3


QUICK = StepMeasurement(
    splits=((SMALL, {}), (SMALL, {REPLICATE: 2})),
    held_out=(({**SMALL, "model.ffn": 128}, {}),),
    steps=1,
    rounds=1,
)
"""The least that anything can be fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepsOfRound:
    """Name the steps of a plan in a round."""

    plan: str
    hidden: int
    ffn: int
    round: int


def plan_of_split(split: TrainerSplit, cluster: Cluster) -> Plan:
    """Return a plan on as many devices of `cluster` as its mesh has ranks."""
    model, layout = split
    world = prod(int(str(layout.get(axis, 1))) for axis in (PP, DP, REPLICATE, CP, TP))
    settings = [f"{key}={str(value).lower()}" for key, value in model.items()]
    request = make_request("nano", cluster=f"{world}xcpu", settings=settings)
    plan = request.job(layout).plan
    return replace(plan, cluster=first_devices(cluster, world))


def measure_trainer(
    ranks: JobRanks,
    cluster: Cluster,
    wanted: StepMeasurement,
    done: UnfinishedMeasurements,
    say: Callable[[str], None] = lambda _: None,
) -> TrainerFit:
    """Return `cluster` with what the steps of the plans that fit a node of it told.

    What is `done` is not measured again.
    """
    node = cluster.devices_per_node
    plans = [
        (plan, is_fitted)
        for splits, is_fitted in ((wanted.splits, True), (wanted.held_out, False))
        for plan in (plan_of_split(split, cluster) for split in splits)
        if plan.mesh.world_size <= node
    ]
    names = [[_name(plan, number) for plan, _ in plans] for number in range(wanted.rounds)]
    missing = {name for row in names for name in row if name not in done.found}
    if missing:
        part = "" if len(missing) == len(plans) * wanted.rounds else " that are still missing"
        say(f"measuring steps of {len(plans)} plans on 1 to {node} ranks{part}")
    seconds = dict(done.found)
    for row in names:
        for name, (plan, _) in zip(row, plans, strict=True):
            if name in missing:
                seconds[name] = step_s(ranks, plan, warmup=wanted.warmup, steps=wanted.steps)
                done.journal.append(name, seconds[name])
    timed = [
        TimedStep(plan=plan, seconds=median(seconds[row[place]] for row in names), fitted=is_fitted)
        for place, (plan, is_fitted) in enumerate(plans)
    ]
    return fit_trainer(cluster, our_constants(cluster), timed)


def step_s(ranks: JobRanks, plan: Plan, *, warmup: int, steps: int) -> float:
    """Return the seconds of a step of `plan` on the first ranks: the slowest one's median."""
    from echelon.training.measure.trainer import StepsJob, take_steps

    job = StepsJob(plan=plan, warmup=warmup, steps=steps)
    return max(ranks.run(take_steps, job, plan.mesh.world_size))


def _name(plan: Plan, number: int) -> str:
    model = plan.model
    return measurement_name(
        _StepsOfRound(plan=plan_label(plan), hidden=model.hidden, ffn=model.ffn, round=number)
    )
