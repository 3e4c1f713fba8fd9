# SPDX-License-Identifier: Apache-2.0
"""The schedule of a plan: its actions, its stages, and everything that is wrong with it.

The forward passes alone serve an evaluation on the stages of a training schedule. The number of
microbatches is free: an evaluation may have fewer than the schedule needs for training, or an odd
number. Where the training schedule has mirrored microbatches, every second one is mirrored here, so
that both copies of the model work from the start.

What `ec.plan` makes has been checked with its settings. A plan may also be read from a file, or
changed in Python: before any rank starts, its rows are proven here as those of a file are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from echelon.core.errors import EchelonError, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.pipeline import (
    ROWS_FIT_PLAN,
    STAGES_COVER_LAYERS,
    STAGES_MATCH_MESH,
    TIED_ENDS_MIRRORED,
)
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import SCHEDULES, build_schedule, schedule_problems
from echelon.schedule.check import check_schedule
from echelon.schedule.rows import FileRow, parse_words, schedule_from_actions


def schedule_from_plan(plan: Plan) -> Schedule:
    """Return the schedule that a plan names, or whose rows it holds."""
    pipeline = plan.layout.pipeline
    if pipeline.rows:
        return schedule_from_rows(pipeline.schedule, pipeline.rows)
    return _build(pipeline.schedule, **_numbers(plan))


def stage_placement_from_plan(plan: Plan) -> Schedule:
    """Return where the stages and microbatches of a plan lie: its schedule without any action.

    It is there for numbers that no builder takes, too, and costs nothing for thousands of ranks.
    """
    pipeline = plan.layout.pipeline
    return placement(pipeline.schedule, pipeline.rows, **_numbers(plan))


def num_microbatches_on_stage(plan: Plan, pp_rank: int, stage: int) -> int:
    """Return how many microbatches cross `stage` on pipeline rank `pp_rank` in a step."""
    return sum(count for _, count in _crossings(stage_placement_from_plan(plan), pp_rank, stage))


def messages_from_plan(plan: Plan, pp_rank: int) -> tuple[Counter[int], Counter[int]]:
    """Return the activations and the gradients that a pipeline rank sends in a step, by receiver.

    Receivers are places of the pipeline. Tensors for a stage on the same rank are no messages.
    """
    placement = stage_placement_from_plan(plan)
    last = placement.num_stages - 1
    activations, gradients = Counter[int](), Counter[int]()
    for stage in placement.stages_of(pp_rank):
        for one, count in _crossings(placement, pp_rank, stage):
            if stage < last:
                activations[placement.rank_of(stage + 1, one)] += count
            if stage > 0:
                gradients[placement.rank_of(stage - 1, one)] += count
    del activations[pp_rank], gradients[pp_rank]
    return activations, gradients


def _crossings(placement: Schedule, pp_rank: int, stage: int) -> Iterator[tuple[int, int]]:
    """Yield a microbatch of each way through the ranks that crosses a stage here, and how many."""
    mirrored = set(placement.mirrored)
    plain = [one for one in range(placement.num_microbatches) if one not in mirrored]
    for way in (plain, placement.mirrored):
        if way and placement.rank_of(stage, way[0]) == pp_rank:
            yield way[0], len(way)


@lru_cache(maxsize=64)
def schedule_from_rows(name: str, rows: tuple[str, ...]) -> Schedule:
    """Return the schedule whose ranks run `rows`, such as ``F0.0 F0.1 B0.0 W0.0``.

    Who owns a stage, and which microbatches are mirrored, follows from where actions stand.
    ValueError where a word is not an action.
    """
    actions = [[Action.parse(word) for word in row.split()] for row in rows]
    return schedule_from_actions(name, actions)


@lru_cache(maxsize=64)
def placement(
    name: str, rows: tuple[str, ...] = (), *, num_stages: int, num_ranks: int, num_microbatches: int
) -> Schedule:
    """Return where stages and microbatches lie under a schedule of this name, or of these rows."""
    if rows:
        return replace(schedule_from_rows(name, rows), actions=())
    return SCHEDULES[name](
        num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    ).placement()


_build = lru_cache(maxsize=64)(build_schedule)


def _numbers(plan: Plan) -> dict[str, int]:
    return {
        "num_stages": plan.num_stages,
        "num_ranks": plan.mesh.pp,
        "num_microbatches": plan.num_microbatches,
    }


@lru_cache(maxsize=16)
def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return the evaluation of `num_microbatches` on the stages of `schedule`.

    Ranks take what is there, in the order of `_urgency`, as if all stages took equally long: no
    rank waits while it could work. It cannot deadlock, being an order that has run.
    """
    empty = replace(
        schedule,
        name=f"{schedule.name} (forward)",
        num_microbatches=num_microbatches,
        actions=(),
        mirrored=tuple(range(1, num_microbatches, 2)) if schedule.mirrored else (),
    )
    return replace(empty, actions=_rows(empty))


_Cell = tuple[int, int]
"""A stage and a microbatch."""


def _rows(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Run one action per rank and tick, until all have run."""
    ready: list[set[_Cell]] = [set() for _ in range(schedule.num_ranks)]
    for microbatch in range(schedule.num_microbatches):
        ready[schedule.rank_of(0, microbatch)].add((0, microbatch))
    rows: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    urgency = _urgency(schedule)
    while any(ready):
        ran: list[_Cell] = []
        for row, cells in zip(rows, ready, strict=True):
            if cells:
                stage, microbatch = min(cells, key=urgency)
                cells.remove((stage, microbatch))
                row.append(Action(ActionKind.F, stage, microbatch))
                ran.append((stage, microbatch))
        for stage, microbatch in ran:
            if stage + 1 < schedule.num_stages:
                ready[schedule.rank_of(stage + 1, microbatch)].add((stage + 1, microbatch))
    return tuple(tuple(row) for row in rows)


def _urgency(schedule: Schedule) -> Callable[[_Cell], tuple[int, ...]]:
    """Return what sorts the cells that a rank could run.

    As a rule the deepest stage comes first, so that what is begun is finished early and few outputs
    wait between stages. In looped placements (interleaved 1F1B) microbatches go around in groups of
    at least p, as a last group of fewer would leave ranks idle.
    """
    owners, num_ranks = schedule.stage_ranks, schedule.num_ranks
    looped = len(owners) > num_ranks and all(
        rank == stage % num_ranks for stage, rank in enumerate(owners)
    )
    last_group = max(0, schedule.num_microbatches // num_ranks - 1)

    def urgency(cell: _Cell) -> tuple[int, ...]:
        stage, microbatch = cell
        if looped:
            return min(microbatch // num_ranks, last_group), stage, microbatch
        return -stage, microbatch

    return urgency


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


def tied_embedding_problems(schedule: Schedule, *, key: str) -> Iterator[Problem]:
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
