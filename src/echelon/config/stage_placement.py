# SPDX-License-Identifier: Apache-2.0
"""Which blocks each stage holds, and for schedules that no builder makes, what each rank runs.

What was found stands as the source of the setting that asked for it: `echelon config show`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.config.files.times_file import unit_times
from echelon.config.job import Job
from echelon.config.settings.pipeline import (
    AUTO,
    EVEN,
    FILE,
    LIMIT_KEY,
    SCHEDULE_KEY,
    STAGES_KEY,
    TIMES_KEY,
    VIRTUAL_KEY,
    in_flight_limits,
    schedule_file,
    stages_per_rank,
)
from echelon.config.view import View
from echelon.core.errors import InfeasiblePlan
from echelon.core.plan import Pipeline, Plan
from echelon.cost.seconds.stages import (
    PipelineOrder,
    Stages,
    balance,
    balanced_stages,
    imbalance,
    split_layers,
)
from echelon.cost.seconds.unit_times import UnitTimes, durations_from_stages
from echelon.schedule.action import Schedule
from echelon.schedule.from_plan import schedule_from_rows, stage_placement_from_plan

if TYPE_CHECKING:
    from echelon.schedule.automatic import FoundSchedule

MOST_SEARCHED_TWICE = 128
"""Ranks x microbatches up to which a search looks at two stages on a rank, too: some seconds."""

SEARCH_NOTE_SEPARATOR = "; found: "
"""What parts the source of `pipeline.schedule` from what the search that it asked for has found."""

Derived = Mapping[str, tuple[object, str]]
"""Value and source of each setting that was left to us, by its key."""


def provisional_pipeline(view: View) -> Pipeline:
    """Return the pipeline with stages as they are listed, else even, and without rows."""
    virtual, layers = stages_per_rank(view), view.integer("model.layers")
    listed = view.stage_lists()
    return Pipeline(
        schedule=view.word(SCHEDULE_KEY),
        virtual_stages=virtual,
        stages=split_layers(layers, virtual * view.integer("mesh.pp"))
        if listed is None
        else tuple(tuple(stage) for stage in listed),
    )


def place_stages(view: View, plan: Plan) -> tuple[Plan, Derived]:
    """Return a plan of a provisional pipeline with its stages and rows, and what was derived."""
    name = view.word(SCHEDULE_KEY)
    derived: dict[str, tuple[object, str]] = {}
    if VIRTUAL_KEY not in view.entries and plan.layout.pipeline.virtual_stages > 1:
        per_rank = plan.layout.pipeline.virtual_stages
        derived[VIRTUAL_KEY] = per_rank, f'derived: what "{name}" puts on a rank'
    times = unit_times(plan, view.word(TIMES_KEY))
    if name == AUTO:
        pipeline, held = _automatic(view, plan, times, derived)
    elif name == FILE:
        rows = _rows(schedule_file(view).schedule)
        pipeline = replace(plan.layout.pipeline, rows=rows)
        held = _stages_of_schedule(schedule_from_rows(name, rows))
    else:
        pipeline = plan.layout.pipeline
        held = _stages_of_schedule(stage_placement_from_plan(plan))
    word = view.entry(STAGES_KEY).value
    if name != AUTO and word == AUTO:
        order = PipelineOrder.from_plan(
            replace(plan, layout=replace(plan.layout, pipeline=pipeline))
        )
        stages = balanced_stages(order, times, plan.model.layers)
        pipeline = replace(pipeline, stages=stages)
    if word in (AUTO, EVEN):
        source = _how_balanced(pipeline.stages, held, times, even=word == EVEN)
        derived[STAGES_KEY] = pipeline.stages, source
    return replace(plan, layout=replace(plan.layout, pipeline=pipeline)), derived


def _stages_of_schedule(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    return tuple(schedule.stages_of(rank) for rank in range(schedule.num_ranks))


def _rows(schedule: Schedule) -> tuple[str, ...]:
    return tuple(" ".join(map(str, row)) for row in schedule.actions)


def _how_balanced(
    stages: Stages, held: Sequence[Sequence[int]], times: UnitTimes, *, even: bool
) -> str:
    if len(stages) == 1:
        return "derived: one stage holds every block"
    now = imbalance(stages, held, times)
    if even:
        return f"derived: an even split, slowest rank {now:.2f}x of the mean"
    before = imbalance(split_layers(sum(map(len, stages)), len(stages)), held, times)
    return (
        f"derived: balanced by {times.source} times, slowest rank {now:.2f}x of the mean "
        f"(even split {before:.2f}x)"
    )


def _automatic(
    view: View, plan: Plan, times: UnitTimes, derived: dict[str, tuple[object, str]]
) -> tuple[Pipeline, tuple[tuple[int, ...], ...]]:
    """Return the pipeline with the best schedule found, and what each rank holds under it.

    With two stages on a rank they may lie in turn or as a V; the better is taken. Each cut is tried
    under each placement, so that the stages found, written out, give this very schedule again.
    """
    pp, limits = plan.mesh.pp, in_flight_limits(view)
    candidates = [
        candidate
        for virtual in _stages_on_a_rank(view, plan)
        for candidate in _candidates(view, plan, times, virtual)
    ]
    stages, best = min(candidates, key=lambda candidate: candidate[1].makespan_s)
    virtual = len(stages) // pp
    if limits is None:
        source = f"derived: pp x virtual_stages = {pp} x {virtual}, the peak of 1f1b"
        derived[LIMIT_KEY] = pp * virtual, source
    if virtual != plan.layout.pipeline.virtual_stages:
        derived[VIRTUAL_KEY] = virtual, f"derived: the search is fastest with {virtual} on a rank"
    note = _how_good(best, [found for _, found in candidates])
    source = view.entry(SCHEDULE_KEY).source
    derived[SCHEDULE_KEY] = AUTO, f"{source}{SEARCH_NOTE_SEPARATOR}{note}"
    pipeline = replace(
        plan.layout.pipeline, virtual_stages=virtual, stages=stages, rows=_rows(best.schedule)
    )
    return pipeline, _stages_of_schedule(best.schedule)


def _stages_on_a_rank(view: View, plan: Plan) -> tuple[int, ...]:
    """Return how many stages a rank may have: as it is set, else one or two, if that is quick.

    Two are half as large each, so that as many pairs again fit into the same memory.
    """
    pp, word = plan.mesh.pp, view.entry(STAGES_KEY).value
    free = VIRTUAL_KEY not in view.entries and LIMIT_KEY not in view.entries
    small = pp * plan.num_microbatches <= MOST_SEARCHED_TWICE
    if free and small and word in (AUTO, EVEN) and 2 * pp <= plan.model.layers:
        return 1, 2
    return (plan.layout.pipeline.virtual_stages,)


def _candidates(
    view: View, plan: Plan, times: UnitTimes, virtual: int
) -> Iterator[tuple[Stages, FoundSchedule]]:
    """Yield ways to cut the model and to place its stages, and the schedule found for each."""
    from echelon.schedule.automatic import find_schedule

    pp, layers, word = plan.mesh.pp, plan.model.layers, view.entry(STAGES_KEY).value
    limits = in_flight_limits(view) or (pp * virtual,) * pp
    placements = stage_placements(pp, virtual)
    if word == AUTO:
        cuts = [balance(times, layers, stages_of_ranks(ranks)) for ranks in placements]
    elif word == EVEN:
        cuts = [split_layers(layers, pp * virtual)]
    else:
        cuts = [plan.layout.pipeline.stages]
    for stages in dict.fromkeys(cuts):
        for ranks in placements:
            durations = durations_from_stages(stages, times)
            try:
                found = find_schedule(
                    ranks, plan.num_microbatches, durations, most_in_flight=limits
                )
            except InfeasiblePlan as error:
                set_by = view.set_by(LIMIT_KEY, VIRTUAL_KEY)
                raise InfeasiblePlan(
                    replace(problem, set_by=set_by) for problem in error.problems
                ) from error
            yield stages, found


def stage_placements(pp: int, virtual: int) -> tuple[tuple[int, ...], ...]:
    """Return the rank of each stage: in turn over the ranks; with two on each, also down and up."""
    in_turn = tuple(stage % pp for stage in range(pp * virtual))
    if virtual != 2:
        return (in_turn,)
    return in_turn, tuple(min(stage, 2 * pp - 1 - stage) for stage in range(2 * pp))


def stages_of_ranks(stage_ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, given the rank of each stage."""
    ranks = range(max(stage_ranks) + 1)
    return tuple(tuple(s for s, owner in enumerate(stage_ranks) if owner == r) for r in ranks)


def search_note_of_job(job: Job) -> str:
    """Return what a search for the schedule of a job has found; nothing where there was none."""
    return job.source_of(SCHEDULE_KEY).partition(SEARCH_NOTE_SEPARATOR)[2]


def _how_good(found: FoundSchedule, candidates: Sequence[FoundSchedule]) -> str:
    """Return how long a step takes, beside the best fixed schedule and the least that is known."""
    fixed = [item for candidate in candidates for item in candidate.fixed.items()]
    text = f"{1e3 * found.makespan_s:.4g} ms a step"
    if fixed:
        name, seconds = min(fixed, key=lambda item: item[1])
        less = 100 * (1 - found.makespan_s / seconds)
        text += f", {less:.1f} % less than the best fixed one ({name}, {1e3 * seconds:.4g} ms)"
    least = min(candidate.lower_bound_s for candidate in candidates)
    gap = found.makespan_s / least - 1 if least else 0.0
    return f"{text}, at most {100 * gap:.1f} % above the best there is"
