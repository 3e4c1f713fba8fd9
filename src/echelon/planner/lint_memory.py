"""Lints about what ranks hold, and what is sent or computed again to hold less than is needed."""

from __future__ import annotations

from echelon.core.plan import Plan, ZeroStage
from echelon.cost.model_states import volume
from echelon.planner.guides.memory import RankMemory, memory_of_plan, state_precision
from echelon.planner.guides.situation import GB
from echelon.planner.lint_finding import Fault, Lint

NEARLY_FULL = 0.9
ROOM = 0.8
"""A share of the memory below which something could be held that a plan does without."""


def _memory(plan: Plan) -> int:
    return plan.cluster.device.memory_bytes


def _against(plan: Plan, held: RankMemory) -> str:
    return f"{held.total / GB:,.1f} GB of {_memory(plan) / GB:,.0f} GB"


def _full(plan: Plan) -> Fault | None:
    held = memory_of_plan(plan)
    if held.total <= _memory(plan):
        return None
    return Fault(
        f"{held.states / GB:,.1f} GB of states + {held.gathered / GB:,.1f} gathered + "
        f"{held.activations / GB:,.1f} of activations: {_against(plan, held)}",
        "a higher ZeRO stage, recompute, more tensor or pipeline ranks, or offload",
    )


def _recompute_missing(plan: Plan) -> Fault | None:
    held, recomputed = memory_of_plan(plan), memory_of_plan(plan, recompute=1.0)
    full = held.total > NEARLY_FULL * _memory(plan)
    if plan.layout.recompute.policy == "full" or not full:
        return None
    if recomputed.total > NEARLY_FULL * held.total:
        return None
    return Fault(
        f"{_against(plan, held)} with every activation kept, "
        f"{recomputed.total / GB:,.1f} GB with full recompute",
        "recompute.policy = full: a forward pass more, or smaller microbatches",
    )


def _recompute_needless(plan: Plan) -> Fault | None:
    if plan.layout.recompute.policy != "full":
        return None
    kept = memory_of_plan(plan, recompute=0.0)
    if kept.total > ROOM * _memory(plan):
        return None
    return Fault(
        f"full recompute computes a third more, and without it a rank would hold "
        f"{_against(plan, kept)}",
        "recompute.policy = none",
    )


def _lower_stage(plan: Plan) -> Fault | None:
    zero, mesh = plan.layout.zero, plan.mesh
    if zero.stage != 3 or not zero.reshard_after_forward or mesh.dp_shard * mesh.cp == 1:
        return None
    lower: tuple[ZeroStage, ...] = (0, 1, 2)
    for stage in lower:
        held = memory_of_plan(plan, zero=stage)
        if held.total <= ROOM * _memory(plan):
            return Fault(
                f"stage 3 sends {volume(3).multiples} psi a step of one microbatch, stage {stage} "
                f"{volume(stage).multiples} psi and holds {_against(plan, held)}",
                f"zero.stage = {stage}",
            )
    return None


def _redundant(plan: Plan) -> Fault | None:
    ranks = plan.mesh.dp * plan.mesh.cp
    if plan.layout.zero.stage != 0 or ranks == 1:
        return None
    optimizer = state_precision(plan).optimizer
    dp = plan.mesh.dp
    own = memory_of_plan(plan, dp_shard=dp, dp_replicate=1)
    less = memory_of_plan(plan, dp_shard=dp, dp_replicate=1, zero=1)
    saved = own.states - less.states
    if saved < 0.1 * _memory(plan):
        return None
    return Fault(
        f"{ranks} ranks each hold {optimizer} bytes a weight of optimizer state: stage 1 holds "
        f"{saved / GB:,.1f} GB less a rank and sends the same 2 psi",
        "mesh.dp_shard in place of dp_replicate, and zero.stage = 1",
    )


def _needless_axes(plan: Plan) -> Fault | None:
    mesh = plan.mesh
    others = mesh.tp * mesh.pp
    if others == 1 or mesh.world_size < 2:
        return None
    ranks = mesh.dp * others
    count = plan.num_microbatches // others
    if plan.mathematics.global_sequences % (ranks * plan.layout.microbatch_sequences):
        return None
    stages: tuple[ZeroStage, ...] = (0, 1, 2)
    for stage in stages:
        held = memory_of_plan(
            plan, tp=1, pp=1, dp_shard=ranks, dp_replicate=1, microbatches=count, zero=stage
        )
        if held.total <= ROOM * _memory(plan):
            return Fault(
                f"tp {mesh.tp} x pp {mesh.pp}, though {ranks} data ranks at ZeRO {stage} would "
                f"hold {_against(plan, held)} each",
                f"mesh.tp = 1, mesh.pp = 1, zero.stage = {stage}: one sum of gradients a step",
            )
    return None


def _needless_context(plan: Plan) -> Fault | None:
    mesh = plan.mesh
    ranks = mesh.dp * mesh.cp
    if mesh.cp == 1 or plan.mathematics.global_sequences % (
        ranks * plan.layout.microbatch_sequences
    ):
        return None
    held = memory_of_plan(plan, dp_shard=mesh.dp_shard * mesh.cp, cp=1)
    if held.total > ROOM * _memory(plan):
        return None
    return Fault(
        f"cp = {mesh.cp}, though whole sequences of {plan.mathematics.sequence_length:,} positions "
        f"would take {_against(plan, held)}",
        f"mesh.cp = 1 and {mesh.cp}x the data ranks: no keys on the way",
    )


def _needless_offload(plan: Plan) -> Fault | None:
    if plan.layout.zero.optimizer_offload == "none":
        return None
    held = memory_of_plan(plan, offload=0.0)
    if held.total > ROOM * _memory(plan):
        return None
    return Fault(
        f"optimizer state travels every step, and would fit: {_against(plan, held)}",
        "zero.optimizer_offload = none",
    )


MEMORY = (
    Lint(
        id="does-not-fit",
        severity="memory",
        why="By the formulas of cost/lattice the fullest rank holds more than its device has.",
        source="Rajbhandari et al., 2020, section 3; Korthikanti et al., 2022, section 4",
        check=_full,
    ),
    Lint(
        id="no-recompute-when-full",
        severity="memory",
        why="Recomputing keeps the input of each block only, for one forward pass more.",
        source="guide 002, best practices; Chen et al., 2016",
        check=_recompute_missing,
    ),
    Lint(
        id="recompute-without-need",
        severity="time",
        why="What fits need not be computed twice.",
        source="Korthikanti et al., 2022, section 5",
        check=_recompute_needless,
    ),
    Lint(
        id="zero-3-without-need",
        severity="time",
        why="Stages 0 to 2 send 2 psi, stage 3 gathers again in backward: 3 psi.",
        source="Rajbhandari et al., 2020, section 7; 003-71 of the errata",
        check=_lower_stage,
    ),
    Lint(
        id="optimizer-held-by-all",
        severity="memory",
        why="Stage 1 sends what stage 0 sends, and shares the optimizer state out.",
        source="Rajbhandari et al., 2020, section 7.2; 002-38 of the errata",
        check=_redundant,
    ),
    Lint(
        id="axes-without-need",
        severity="time",
        why="Data parallelism alone sends once a step; other axes are for what does not fit.",
        source="guide 002, best practices",
        check=_needless_axes,
    ),
    Lint(
        id="cp-without-need",
        severity="time",
        why="Context ranks send keys and values in every block; they are for long sequences.",
        source="guide 003, section 10",
        check=_needless_context,
    ),
    Lint(
        id="offload-without-need",
        severity="time",
        why="A host's memory is reached over PCIe, tens of times slower than the device's own.",
        source="Ren et al., ZeRO-Offload, 2021, section 3",
        check=_needless_offload,
    ),
)
