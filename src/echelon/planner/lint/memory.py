# SPDX-License-Identifier: Apache-2.0
"""Lints about what ranks hold, and what is sent or computed again to hold less than is needed."""

from __future__ import annotations

import json

from echelon.core.plan import Plan, RecomputedOperator, ZeroStage
from echelon.core.units import GIB, binary_bytes, gib
from echelon.cost.bytes.model_sizes import communication_volume
from echelon.planner.lint.finding import LintMatch, lint_of
from echelon.planner.predict.estimate import estimate_plan
from echelon.planner.predict.split_memory import RankMemory, memory_of_plan, state_precision
from echelon.planner.search.options import redone_numbers

DOES_NOT_FIT = "does-not-fit"
_NEARLY_FULL = 0.9  # of the memory
ROOM = 0.8
"""A share of the memory below which something could be held that a plan does without."""
_LOWER_STAGES: tuple[ZeroStage, ...] = (0, 1, 2)


def _memory(plan: Plan) -> int:
    return plan.cluster.device.memory_bytes


def _against(plan: Plan, held: RankMemory) -> str:
    return f"{gib(held.total)} of {gib(_memory(plan))} GiB"


def _gathers_again(plan: Plan) -> bool:
    """True if ranks gather the parameters of a unit again in backward."""
    zero, mesh = plan.layout.zero, plan.mesh
    return zero.stage == 3 and zero.reshard_after_forward and mesh.dp_shard * mesh.cp > 1


def _more_operators(plan: Plan) -> tuple[tuple[RecomputedOperator, ...], ...]:
    """Return sets of operators that leave out more than those of a plan, least work first."""
    if not plan.model.has_dense_blocks:
        return ()
    sets: tuple[tuple[RecomputedOperator, ...], ...] = (("norm", "activation"), ("norm", "mlp"))
    mine = plan.layout.recompute.operators
    return tuple(one for one in sets if "mlp" not in mine and not {*one} <= {*mine})


def _with_operators(plan: Plan, operators: tuple[RecomputedOperator, ...]) -> RankMemory:
    return memory_of_plan(plan, recompute=0.0, **redone_numbers(operators))


def _toml(operators: tuple[RecomputedOperator, ...]) -> str:
    return json.dumps([*operators])


@lint_of(
    DOES_NOT_FIT,
    "memory",
    "Rajbhandari et al., 2020, section 3; Korthikanti et al., 2022, section 4",
)
def _full(plan: Plan) -> LintMatch | None:
    """By the formulas of cost/bytes the fullest rank holds more than its device has.

    What round figures say is too much is computed moment by moment (`cost/peak`).
    """
    estimate = estimate_plan(plan)
    if memory_of_plan(plan).total <= _memory(plan) or estimate.bytes_held <= _memory(plan):
        return None
    terms = sorted(estimate.bytes.items(), key=lambda term: -term[1])
    shown = " + ".join(f"{gib(size)} {name}" for name, size in terms if size >= 0.05 * GIB)
    return (
        f"{gib(estimate.bytes_held)} GiB on the fullest rank, its device has "
        f"{gib(_memory(plan))}: {shown}",
        "a higher ZeRO stage, recompute, more tensor or pipeline ranks, or offload",
    )


@lint_of("no-recompute-when-full", "memory", "distributed, best practices; Chen et al., 2016")
def _recompute_missing(plan: Plan) -> LintMatch | None:
    """Operators that take next to no time leave out a third of what a block keeps; full recompute
    keeps its input only, for one forward pass more."""
    held, recomputed = memory_of_plan(plan), memory_of_plan(plan, recompute=1.0)
    full = held.total > _NEARLY_FULL * _memory(plan)
    if plan.layout.recompute.policy == "full" or not full:
        return None
    if recomputed.total > _NEARLY_FULL * held.total:
        return None
    kept = "what other blocks keep" if plan.layout.recompute.operators else "every activation kept"
    for operators in _more_operators(plan):
        some = _with_operators(plan, operators)
        if some.total <= _NEARLY_FULL * _memory(plan):
            return (
                f"{_against(plan, held)} with {kept}, {gib(some.total)} GiB where "
                f"{' and '.join(operators)} of each block are computed again",
                f"recompute.policy = selective, recompute.operators = {_toml(operators)}",
            )
    return (
        f"{_against(plan, held)} with {kept}, {gib(recomputed.total)} GiB with full recompute",
        "recompute.policy = full: a forward pass more, or smaller microbatches",
    )


@lint_of("recompute-without-need", "time", "Korthikanti et al., 2022, section 5")
def _recompute_needless(plan: Plan) -> LintMatch | None:
    """What fits need not be computed twice: not whole blocks where a few operators do."""
    if plan.layout.recompute.policy != "full":
        return None
    kept = memory_of_plan(plan, recompute=0.0)
    if kept.total > ROOM * _memory(plan):
        for operators in _more_operators(plan):
            some = _with_operators(plan, operators)
            if some.total <= ROOM * _memory(plan):
                return (
                    f"full recompute computes a third more, and with {' and '.join(operators)} "
                    f"alone computed again a rank would hold {_against(plan, some)}",
                    f"recompute.policy = selective, recompute.operators = {_toml(operators)}",
                )
        return None
    return (
        f"full recompute computes a third more, and without it a rank would hold "
        f"{_against(plan, kept)}",
        "recompute.policy = none",
    )


@lint_of(
    "zero-3-without-need",
    "time",
    "Rajbhandari et al., 2020, section 7; llm-training-71 of the errata",
)
def _lower_stage(plan: Plan) -> LintMatch | None:
    """Stages 0 to 2 send 2 psi, stage 3 gathers again in backward: 3 psi."""
    if not _gathers_again(plan):
        return None
    for stage in _LOWER_STAGES:
        held = memory_of_plan(plan, zero=stage)
        if held.total <= ROOM * _memory(plan):
            return (
                f"stage 3 sends {communication_volume(3).multiples} psi a step of one "
                f"microbatch, stage {stage} {communication_volume(stage).multiples} psi and "
                f"holds {_against(plan, held)}",
                f"zero.stage = {stage}",
            )
    return None


@lint_of(
    "optimizer-held-by-all",
    "memory",
    "Rajbhandari et al., 2020, section 7.2; distributed-38 of the errata",
)
def _redundant(plan: Plan) -> LintMatch | None:
    """Stage 1 sends what stage 0 sends, and shares the optimizer state out."""
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
    return (
        f"{ranks} ranks each hold {optimizer} bytes a weight of optimizer state: stage 1 holds "
        f"{binary_bytes(saved)} less a rank and sends the same 2 psi",
        "mesh.dp_shard in place of dp_replicate, and zero.stage = 1",
    )


@lint_of("axes-without-need", "time", "distributed, best practices")
def _needless_axes(plan: Plan) -> LintMatch | None:
    """Data parallelism alone sends once a step; other axes are for what does not fit."""
    mesh = plan.mesh
    others = mesh.tp * mesh.pp
    if others == 1 or mesh.world_size < 2:
        return None
    ranks = mesh.dp * others
    count = plan.num_microbatches // others
    if plan.mathematics.global_sequences % (ranks * plan.layout.microbatch_sequences):
        return None
    for stage in _LOWER_STAGES:
        held = memory_of_plan(
            plan, tp=1, pp=1, dp_shard=ranks, dp_replicate=1, microbatches=count, zero=stage
        )
        if held.total <= ROOM * _memory(plan):
            return (
                f"tp {mesh.tp} x pp {mesh.pp}, though {ranks} data ranks at ZeRO {stage} would "
                f"hold {_against(plan, held)} each",
                f"mesh.tp = 1, mesh.pp = 1, zero.stage = {stage}: one sum of gradients a step",
            )
    return None


@lint_of("cp-without-need", "time", "llm-training, section 10")
def _needless_context(plan: Plan) -> LintMatch | None:
    """Context ranks send keys and values in every block; they are for long sequences."""
    mesh = plan.mesh
    ranks = mesh.dp * mesh.cp
    uneven = plan.mathematics.global_sequences % (ranks * plan.layout.microbatch_sequences)
    if mesh.cp == 1 or uneven:
        return None
    held = memory_of_plan(plan, dp_shard=mesh.dp_shard * mesh.cp, cp=1)
    if held.total > ROOM * _memory(plan):
        return None
    return (
        f"cp = {mesh.cp}, though whole sequences of {plan.mathematics.sequence_length:,} positions "
        f"would take {_against(plan, held)}",
        f"mesh.cp = 1 and {mesh.cp}x the data ranks: no keys on the way",
    )


@lint_of("offload-without-need", "time", "Ren et al., ZeRO-Offload, 2021, section 3")
def _needless_offload(plan: Plan) -> LintMatch | None:
    """A host's memory is reached over PCIe, tens of times slower than the device's own."""
    if plan.layout.zero.optimizer_offload == "none":
        return None
    held = memory_of_plan(plan, offload=0.0)
    if held.total > ROOM * _memory(plan):
        return None
    return (
        f"optimizer state travels every step, and would fit: {_against(plan, held)}",
        "zero.optimizer_offload = none",
    )


@lint_of(
    "no-room-for-gaps",
    "memory",
    "distributed, pitfalls (distributed-52); Rajbhandari et al., ZeRO, 2020, section 6.3",
)
def _fragments(plan: Plan) -> LintMatch | None:
    """Whole units are gathered into large blocks and given back; what lives on between them leaves
    gaps. A block needs one gap as large as itself: where less than that is left, memory that is
    free may not be found.
    """
    if not _gathers_again(plan):
        return None
    held = memory_of_plan(plan)
    free = _memory(plan) - held.total
    if free < 0 or free >= held.gathered:
        return None
    return (
        f"{_against(plan, held)}, {gib(free)} GiB free, and {gib(held.gathered)} GiB of "
        "units are gathered and given back in every pass",
        f"smaller microbatches or recompute, until {gib(held.gathered)} GiB are free",
    )
