"""The schedule of a plan, and what each pipeline rank holds of the model because of it."""

from __future__ import annotations

from functools import lru_cache

from echelon.core.plan import Plan
from echelon.schedule.action import Action, Schedule
from echelon.schedule.build import build_schedule


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule that a plan names, or whose rows it holds."""
    pipeline = plan.layout.pipeline
    return _schedule(
        pipeline.schedule,
        pipeline.rows,
        num_stages=plan.num_stages,
        num_ranks=plan.mesh.pp,
        num_microbatches=plan.num_microbatches,
    )


def stages_of(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """Return the stages of which pipeline rank `pp_rank` holds the parameters."""
    return schedule_of(plan).stages_of(pp_rank)


def microbatches_of(plan: Plan, pp_rank: int, stage: int) -> int:
    """Return how many microbatches cross `stage` on pipeline rank `pp_rank` in a step."""
    schedule = schedule_of(plan)
    microbatches = range(schedule.num_microbatches)
    return sum(schedule.rank_of(stage, microbatch) == pp_rank for microbatch in microbatches)


def of_rows(name: str, rows: tuple[str, ...]) -> Schedule:
    """Return the schedule whose ranks run `rows`, such as ``F0.0 F0.1 B0.0 W0.0``.

    Who owns a stage follows from where its actions stand; `check_schedule` says whether that is
    one rank. ValueError where a word is not an action.
    """
    actions = tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)
    owner: dict[int, int] = {}
    microbatches = 0
    for rank, row in enumerate(actions):
        for action in row:
            owner.setdefault(action.stage, rank)
            microbatches = max(microbatches, action.microbatch + 1)
    stages = range(max(owner, default=-1) + 1)
    return Schedule(
        name=name,
        num_ranks=len(rows),
        num_microbatches=microbatches,
        # A stage that no row names is put on rank 0, where the checker misses its actions.
        stage_ranks=tuple(owner.get(stage, 0) for stage in stages),
        actions=actions,
    )


@lru_cache(maxsize=64)
def _schedule(
    name: str, rows: tuple[str, ...], *, num_stages: int, num_ranks: int, num_microbatches: int
) -> Schedule:
    if rows:
        return of_rows(name, rows)
    return build_schedule(
        name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    )
