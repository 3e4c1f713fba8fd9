# SPDX-License-Identifier: Apache-2.0
"""Lints about pipelines: the bubble, what waits in it, and uneven stages."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.cost.seconds.unit_times import stage_seconds, unit_times_from_formulas
from echelon.planner.lint.finding import LintMatch, lint_of
from echelon.schedule.build import PLAIN_SCHEDULE, SCHEDULES, builder_of, schedule_problems

MICROBATCHES_A_STAGE = 4  # microbatches
_LARGE_BUBBLE = 0.05  # of the step
_UNEVEN = 1.1  # times the mean stage


def bubble_fraction(plan: Plan) -> float | None:
    """Return the idle share of a step by the closed form; None where there is none."""
    name = plan.layout.pipeline.schedule
    numbers = {
        "num_stages": plan.num_stages,
        "num_ranks": plan.mesh.pp,
        "num_microbatches": plan.num_microbatches,
    }
    if name not in SCHEDULES or schedule_problems(name, **numbers):
        return None
    return builder_of(name, **numbers).bubble_fraction()


@lint_of(
    "microbatches-per-stage",
    "time",
    "distributed, best practices (distributed-26); Narayanan et al., 2021, section 2.2",
)
def _microbatches(plan: Plan) -> LintMatch | None:
    """The bubble is (p - 1)/(m + p - 1) of a step for GPipe and 1F1B: a fifth of it at m = 4 p,
    nearly half at m = p.
    """
    pp, count, bubble = plan.mesh.pp, plan.num_microbatches, bubble_fraction(plan)
    if pp == 1 or count >= MICROBATCHES_A_STAGE * pp or bubble is None or bubble <= _LARGE_BUBBLE:
        return None
    least = MICROBATCHES_A_STAGE * pp
    return (
        f"{count} microbatches for {pp} pipeline ranks: {100 * bubble:.0f} % of a step is bubble",
        f"{least} microbatches: fewer data ranks, smaller microbatches, a larger batch; or "
        "virtual stages, or a zero-bubble schedule",
    )


@lint_of(
    "gpipe-holds-all",
    "memory",
    "Narayanan et al., 2021, section 2.2; distributed (distributed-22, distributed-25)",
)
def _gpipe(plan: Plan) -> LintMatch | None:
    """GPipe frees nothing before the last forward; 1F1B has the same bubble and holds at most p
    microbatches.
    """
    pp, count, name = plan.mesh.pp, plan.num_microbatches, plan.layout.pipeline.schedule
    outdone = SCHEDULES[name].outdone_from(pp) if name in SCHEDULES else None
    if outdone is None or count <= outdone:
        return None
    return (
        f"{name} holds {count} microbatches on each rank, {PLAIN_SCHEDULE} at most {pp}, "
        "and both wait equally",
        f"pipeline.schedule = {PLAIN_SCHEDULE}",
    )


@lint_of("stages-uneven", "time", "distributed, pitfalls (llm-training-34)")
def _stages(plan: Plan) -> LintMatch | None:
    """Every rank waits for the slowest stage in every microbatch; the ends have embedding and head
    beside their blocks.
    """
    if plan.mesh.pp == 1:
        return None
    seconds = stage_seconds(plan.layout.pipeline.stages, unit_times_from_formulas(plan))
    mean = sum(seconds) / len(seconds)
    slowest = max(seconds)
    if slowest <= _UNEVEN * mean:
        return None
    return (
        f"stage {seconds.index(slowest)} takes {slowest / mean:.2f}x the mean stage, and all wait "
        "for it",
        "pipeline.stages = auto (by seconds, embedding and head counted), or fewer stages",
    )


@lint_of("empty-stages", "time", "distributed, pitfalls")
def _virtual(plan: Plan) -> LintMatch | None:
    """A stage without blocks only passes activations on: latency without work."""
    virtual, blocks = plan.layout.pipeline.virtual_stages, plan.model.layers
    empty = sum(not stage for stage in plan.layout.pipeline.stages[1:-1])
    if plan.mesh.pp == 1 or not empty:
        return None
    return (
        f"{blocks} blocks on {plan.num_stages} stages ({virtual} a rank): {empty} hold no block",
        "fewer stages: pipeline.virtual_stages, or mesh.pp",
    )


PIPELINE = (_microbatches, _gpipe, _stages, _virtual)
