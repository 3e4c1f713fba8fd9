"""The numbers of a plan: its split, and the whole of what the formulas of the lattice read."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.plan import DTYPE_BYTES, OptimizerKind, Plan, Precision, Zero
from echelon.cost.lattice.block import Work
from echelon.cost.lattice.numbers import LayoutNumbers
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.of_model import model_numbers
from echelon.cost.lattice.pipeline import index_of
from echelon.cost.lattice.software import Software
from echelon.cost.updates import STATE_KINDS

LIKE = {"interleaved-1f1b": "interleaved", "auto": "zb-h1", "file": "1f1b"}
"""Schedules by another name than the lattice's, or without a closed form of their own: a search in
the memory of 1f1b finds about what zb-h1 does."""


def work_of(plan: Plan, software: Software | None = None) -> Work:
    """Return what the formulas of the lattice read of a plan.

    `software` says what the plan leaves open; dtypes and optimizer are those of the plan.
    """
    mathematics = plan.mathematics
    return Work(
        model=model_numbers(plan.model, mathematics.sequence_length, tp=float(plan.mesh.tp)),
        machine=machine_numbers(
            plan.cluster, mathematics.precision.parameters, ranks=plan.mesh.world_size
        ),
        software=software_of(
            software or Software(), mathematics.precision, mathematics.optimizer.kind
        ),
        layout=layout_numbers(plan),
    )


def layout_numbers(plan: Plan) -> LayoutNumbers:
    """Return the numbers of the split of a plan."""
    layout, mesh, layers = plan.layout, plan.mesh, plan.model.layers
    pipeline, context, zero = layout.pipeline, layout.context, layout.zero
    again = sum(map(layout.recompute.recomputes, range(layers)))
    return LayoutNumbers(
        tp=float(mesh.tp),
        cp=float(mesh.cp),
        pp=float(mesh.pp),
        dp_shard=float(mesh.dp_shard),
        dp_replicate=float(mesh.dp_replicate),
        ep=float(mesh.ep),
        expert_tp=float(layout.experts.expert_tp),
        sequence_parallel=float(layout.sequence_parallel),
        ulysses=float(context.ulysses_degree),
        gathered=float(context.kind == "gathered"),
        microbatch=float(layout.microbatch_sequences),
        microbatches=float(plan.num_microbatches),
        virtual=max(1.0, len(pipeline.stages) / mesh.pp),
        schedule=schedule_number(pipeline.schedule),
        zero=float(zero.stage),
        reshard=float(zero.reshard_after_forward),
        recompute=again / layers,
        selective=float(layout.recompute.policy == "selective"),
        offload=float(_offloads(zero)),
    )


def schedule_number(schedule: str) -> float:
    """Return the number of the closed form of a schedule that a plan names."""
    return index_of(LIKE.get(schedule, schedule))


def software_of(
    software: Software, precision: Precision, optimizer: OptimizerKind = "adamw"
) -> Software:
    """Return `software` with the bytes that the dtypes and the optimizer of a run take."""
    master = DTYPE_BYTES[precision.master]
    states = len(STATE_KINDS[optimizer]) * master
    return replace(
        software,
        element_bytes=float(DTYPE_BYTES[precision.parameters]),
        gradient_bytes=float(DTYPE_BYTES[precision.gradients]),
        reduced_bytes=float(DTYPE_BYTES[precision.reduction]),
        state_bytes=float(states + master * precision.has_master),
    )


def _offloads(zero: Zero) -> bool:
    return zero.optimizer_offload != "none"
