"""The schedule of a plan, and what each pipeline rank holds of the model because of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from echelon.core.plan import Plan
from echelon.schedule.action import Action, Schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.owners import placed


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


def placement_of(plan: Plan) -> Schedule:
    """Return where the stages and microbatches of a plan lie: its schedule without any action.

    It is there for numbers that no builder takes, too, and costs nothing for thousands of ranks.
    """
    pipeline = plan.layout.pipeline
    return _placement(
        pipeline.schedule,
        pipeline.rows,
        num_stages=plan.num_stages,
        num_ranks=plan.mesh.pp,
        num_microbatches=plan.num_microbatches,
    )


def microbatches_of(plan: Plan, pp_rank: int, stage: int) -> int:
    """Return how many microbatches cross `stage` on pipeline rank `pp_rank` in a step."""
    return sum(count for _, count in _crossings(placement_of(plan), pp_rank, stage))


def messages_of(plan: Plan, pp_rank: int) -> tuple[int, int]:
    """Return how many activations and how many gradients pipeline rank `pp_rank` sends in a step.

    What goes to a stage on the same rank is no message.
    """
    placement = placement_of(plan)
    last = placement.num_stages - 1
    activations = gradients = 0
    for stage in placement.stages_of(pp_rank):
        for one, count in _crossings(placement, pp_rank, stage):
            if stage < last and placement.rank_of(stage + 1, one) != pp_rank:
                activations += count
            if stage > 0 and placement.rank_of(stage - 1, one) != pp_rank:
                gradients += count
    return activations, gradients


def _crossings(placement: Schedule, pp_rank: int, stage: int) -> Iterator[tuple[int, int]]:
    """Yield a microbatch of each way through the ranks that crosses a stage here, and how many."""
    mirrored = set(placement.mirrored)
    plain = [one for one in range(placement.num_microbatches) if one not in mirrored]
    for way in (plain, placement.mirrored):
        if way and placement.rank_of(stage, way[0]) == pp_rank:
            yield way[0], len(way)


def of_rows(name: str, rows: tuple[str, ...]) -> Schedule:
    """Return the schedule whose ranks run `rows`, such as ``F0.0 F0.1 B0.0 W0.0``.

    Who owns a stage, and which microbatches are mirrored, follows from where actions stand.
    ValueError where a word is not an action.
    """
    return placed(name, [[Action.parse(word) for word in row.split()] for row in rows])


@lru_cache(maxsize=64)
def _schedule(
    name: str, rows: tuple[str, ...], *, num_stages: int, num_ranks: int, num_microbatches: int
) -> Schedule:
    if rows:
        return of_rows(name, rows)
    return build_schedule(
        name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    )


@lru_cache(maxsize=64)
def _placement(
    name: str, rows: tuple[str, ...], *, num_stages: int, num_ranks: int, num_microbatches: int
) -> Schedule:
    if rows:
        return replace(of_rows(name, rows), actions=())
    builder = SCHEDULES[name](
        num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    )
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stage_ranks=builder.stage_ranks(),
        actions=(),
        mirrored=builder.mirrored(),
    )
