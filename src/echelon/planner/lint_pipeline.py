"""Lints about pipelines: the bubble, what waits in it, and uneven stages."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.cost.unit_times import modelled_times, stage_seconds
from echelon.planner.lint_finding import Fault, Lint
from echelon.schedule.build import SCHEDULES, builder_of, schedule_problems

MICROBATCHES_A_STAGE = 4
LARGE_BUBBLE = 0.05
UNEVEN = 1.1


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


def _microbatches(plan: Plan) -> Fault | None:
    pp, count, bubble = plan.mesh.pp, plan.num_microbatches, bubble_fraction(plan)
    if pp == 1 or count >= MICROBATCHES_A_STAGE * pp or bubble is None or bubble <= LARGE_BUBBLE:
        return None
    least = MICROBATCHES_A_STAGE * pp
    return Fault(
        f"{count} microbatches for {pp} pipeline ranks: {100 * bubble:.0f} % of a step is bubble",
        f"{least} microbatches: fewer data ranks, smaller microbatches, a larger batch; or "
        "virtual stages, or a zero-bubble schedule",
    )


def _gpipe(plan: Plan) -> Fault | None:
    pp, count = plan.mesh.pp, plan.num_microbatches
    if plan.layout.pipeline.schedule != "gpipe" or count <= pp:
        return None
    return Fault(
        f"gpipe holds {count} microbatches on each rank, 1f1b at most {pp}, and both wait equally",
        "pipeline.schedule = 1f1b",
    )


def _stages(plan: Plan) -> Fault | None:
    if plan.mesh.pp == 1:
        return None
    seconds = stage_seconds(plan.layout.pipeline.stages, modelled_times(plan))
    mean = sum(seconds) / len(seconds)
    slowest = max(seconds)
    if slowest <= UNEVEN * mean:
        return None
    return Fault(
        f"stage {seconds.index(slowest)} takes {slowest / mean:.2f}x the mean stage, and all wait "
        "for it",
        "pipeline.stages = auto (by seconds, embedding and head counted), or fewer stages",
    )


def _virtual(plan: Plan) -> Fault | None:
    virtual, blocks = plan.layout.pipeline.virtual_stages, plan.model.layers
    empty = sum(not stage for stage in plan.layout.pipeline.stages[1:-1])
    if plan.mesh.pp == 1 or not empty:
        return None
    return Fault(
        f"{blocks} blocks on {plan.num_stages} stages ({virtual} a rank): {empty} hold no block",
        "fewer stages: pipeline.virtual_stages, or mesh.pp",
    )


PIPELINE = (
    Lint(
        id="microbatches-per-stage",
        severity="time",
        why="The bubble is (p - 1)/(m + p - 1) of a step for GPipe and 1F1B: a fifth of it at "
        "m = 4 p, nearly half at m = p.",
        source="guide 002, best practices (002-26); Narayanan et al., 2021, section 2.2",
        check=_microbatches,
    ),
    Lint(
        id="gpipe-holds-all",
        severity="memory",
        why="GPipe frees nothing before the last forward; 1F1B has the same bubble and holds at "
        "most p microbatches.",
        source="Narayanan et al., 2021, section 2.2; guide 002 (002-22, 002-25)",
        check=_gpipe,
    ),
    Lint(
        id="stages-uneven",
        severity="time",
        why="Every rank waits for the slowest stage in every microbatch; the ends have embedding "
        "and head beside their blocks.",
        source="guide 002, pitfalls (003-34)",
        check=_stages,
    ),
    Lint(
        id="empty-stages",
        severity="time",
        why="A stage without blocks only passes activations on: latency without work.",
        source="guide 002, pitfalls",
        check=_virtual,
    ),
)
