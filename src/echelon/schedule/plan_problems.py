# SPDX-License-Identifier: Apache-2.0
"""Everything that is wrong with the pipeline of a plan, whoever made the plan.

What `ec.plan` makes has been checked with its settings. A plan may also be read from a file, or
changed in Python: before any rank starts, its rows are proven here as those of a file are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from echelon.core.errors import EchelonError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.pipeline import (
    ROWS_FIT_PLAN,
    STAGES_COVER_LAYERS,
    STAGES_MATCH_MESH,
    TIED_ENDS_MIRRORED,
)
from echelon.schedule.action import Action, Schedule
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.check import check_schedule
from echelon.schedule.rows import FileRow, parse_words, schedule_from_actions

SCHEDULES_WITH_ROWS = ("file", "auto")
"""The schedules that no builder makes: a plan holds their rows."""

ROWS_KEY = "pipeline.rows"


def pipeline_problems(plan: Plan) -> list[Problem]:
    """Return every problem of a plan's stages, of its schedule, and of the rows that it holds."""
    pipeline = plan.layout.pipeline
    problems = list(_stage_problems(plan))
    if pipeline.schedule in SCHEDULES_WITH_ROWS:
        return [*problems, *_rows_problems(plan)]
    if pipeline.schedule in SCHEDULES and pipeline.rows:
        problems.append(
            ROWS_FIT_PLAN.problem(
                f"the schedule is {pipeline.schedule!r}, which a builder makes, but the plan has "
                f"rows for {len(pipeline.rows)} ranks",
                key=ROWS_KEY,
                suggestions=("rows = ()", 'schedule = "file"'),
            )
        )
    problems += schedule_problems(
        pipeline.schedule,
        num_stages=plan.num_stages,
        num_ranks=plan.mesh.pp,
        num_microbatches=plan.num_microbatches,
    )
    return problems


def coverage_problem(stages: Sequence[Sequence[int]], layers: int) -> list[str]:
    """Return what keeps stages from holding each block once, in order; nothing where they do."""
    listed = [block for stage in stages for block in stage]
    faults: list[str] = []
    if missing := sorted(set(range(layers)) - set(listed)):
        faults.append(f"blocks {_ranges(missing)} are in no stage")
    if extra := sorted(set(listed) - set(range(layers))):
        faults.append(f"blocks {_ranges(extra)} do not exist ({layers} blocks, from 0)")
    if twice := sorted({block for block in listed if listed.count(block) > 1}):
        faults.append(f"blocks {_ranges(twice)} are named more than once")
    if not faults and listed != sorted(listed):
        at = next(i for i, block in enumerate(listed) if block != i)
        faults.append(f"block {listed[at]} stands where block {at} belongs")
    return faults


def tied_embedding_problems(schedule: Schedule, *, key: str, set_by: str = "") -> Iterator[Problem]:
    """Yield that copies of a tied embedding would lie on more than two ranks of a schedule."""
    if not schedule.mirrored:
        return
    first, last = schedule.owners_of(0), schedule.owners_of(schedule.num_stages - 1)
    holders = sorted({*first, *last})
    if len(holders) <= 2:
        return
    yield TIED_ENDS_MIRRORED.problem(
        f"the embedding is tied, and {len(schedule.mirrored)} of {schedule.num_microbatches} "
        f"microbatches cross the ranks the other way round: the first stage is on {_on(first)} and "
        f"the last on {_on(last)}, so that {len(holders)} ranks would hold the embedding",
        key=key,
        set_by=set_by,
        suggestions=("model.tied = false", f"the last stage on {_on(first)}"),
    )


def _on(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


def _stage_problems(plan: Plan) -> Iterator[Problem]:
    pipeline, pp = plan.layout.pipeline, plan.mesh.pp
    if faults := coverage_problem(pipeline.stages, plan.model.layers):
        yield STAGES_COVER_LAYERS.problem(
            f"pipeline.stages: {'; '.join(faults)}", key="pipeline.stages"
        )
    wanted = pp * pipeline.virtual_stages
    if plan.num_stages != wanted:
        yield STAGES_MATCH_MESH.problem(
            f"the plan lists {plan.num_stages} stages, but pp x virtual_stages = {pp} x "
            f"{pipeline.virtual_stages} = {wanted}",
            key="pipeline.stages",
            suggestions=(f"{wanted} stages",),
        )


def _rows_problems(plan: Plan) -> list[Problem]:
    """Return what is wrong with rows, in turn: the words, the numbers, the order, the embedding."""
    rows = [
        FileRow(
            name=f"rank {rank}",
            rank=rank,
            words=tuple(
                (word, f"rank {rank}, place {place}") for place, word in enumerate(row.split())
            ),
        )
        for rank, row in enumerate(plan.layout.pipeline.rows)
    ]
    try:
        actions = parse_words(rows, ROWS_KEY)
        if problems := list(_number_problems(plan, actions)):
            return problems
        schedule = schedule_from_actions(plan.layout.pipeline.schedule, actions)
        check_schedule(schedule)
    except EchelonError as error:
        return list(error.problems)
    return list(tied_embedding_problems(schedule, key=ROWS_KEY)) if plan.model.tied else []


def _number_problems(plan: Plan, actions: Sequence[Sequence[Action]]) -> Iterator[Problem]:
    """Yield each number of the rows that is not the plan's."""
    stages = {action.stage for row in actions for action in row}
    microbatches = {action.microbatch for row in actions for action in row}
    for what, found, wanted in (
        ("ranks", len(actions), plan.mesh.pp),
        ("stages", max(stages, default=-1) + 1, plan.num_stages),
        ("microbatches", max(microbatches, default=-1) + 1, plan.num_microbatches),
    ):
        if found != wanted:
            yield ROWS_FIT_PLAN.problem(
                f"the rows of schedule {plan.layout.pipeline.schedule!r} are for {found} {what}, "
                f"but the plan has {wanted}",
                key=ROWS_KEY,
                suggestions=(f"{wanted} {what}",),
            )


def _ranges(numbers: list[int]) -> str:
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ends]
    return ", ".join(parts[:6]) + (", ..." if len(parts) > 6 else "")
