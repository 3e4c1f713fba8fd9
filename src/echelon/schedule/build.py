# SPDX-License-Identifier: Apache-2.0
"""Build a schedule by name. A new schedule is one file with a `Builder`, and one entry here."""

from __future__ import annotations

from echelon.core.choices.registry import Registry
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.rulebook.pipeline import (
    SCHEDULE_EVEN_MICROBATCHES,
    SCHEDULE_EVEN_RANKS,
    SCHEDULE_KNOWN,
    SCHEDULE_NEEDS_MICROBATCHES,
    SCHEDULE_STAGES_PER_RANK,
)
from echelon.core.rules import did_you_mean
from echelon.schedule.action import Schedule
from echelon.schedule.builders.builder import Builder
from echelon.schedule.builders.dualpipe import DualPipe, DualPipeV
from echelon.schedule.builders.gpipe import GPipe, Naive
from echelon.schedule.builders.interleaved import BreadthFirst, Interleaved
from echelon.schedule.builders.one_f_one_b import OneFOneB
from echelon.schedule.builders.zero_bubble import ZeroBubbleH1, ZeroBubbleH2, ZeroBubbleV

SCHEDULES: Registry[type[Builder]] = Registry(
    "schedule",
    (
        Naive,
        GPipe,
        OneFOneB,
        Interleaved,
        BreadthFirst,
        ZeroBubbleH1,
        ZeroBubbleH2,
        ZeroBubbleV,
        DualPipe,
        DualPipeV,
    ),
)
"""The builder of each schedule, by the name that `pipeline.schedule` takes."""

PLAIN_SCHEDULE = OneFOneB.name
"""What stands where there is nothing to order, and what others are measured by."""

_MOST_VIRTUAL_STAGES = 64  # stages of a rank


def schedules_of_tool(tool: str) -> dict[str, str]:
    """Return the names of schedules by the names that `tool` has for them, the plain one first."""
    found = SCHEDULES.of_tool(tool).items()
    return dict(sorted(found, key=lambda entry: entry[1] != PLAIN_SCHEDULE))


def schedule_problems(
    name: str, *, num_stages: int, num_ranks: int, num_microbatches: int
) -> tuple[Problem, ...]:
    """Return everything that stops schedule `name` from being built with these numbers."""
    if name not in SCHEDULES:
        return (unknown_schedule(name),)
    wanted = SCHEDULES[name](
        num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    )
    return builder_problems(wanted)


def builder_problems(wanted: Builder) -> tuple[Problem, ...]:
    """Return everything that stops a schedule from being built with its numbers."""
    num_stages, num_ranks = wanted.num_stages, wanted.num_ranks
    num_microbatches = wanted.num_microbatches
    problems: list[Problem] = []
    if num_ranks >= 1 and not wanted.fits_ranks(num_ranks):
        problems.append(_odd_ranks(wanted))
    elif not wanted.fits_stages(num_stages, num_ranks):
        problems.append(_wrong_stages(wanted))
    if num_microbatches < wanted.minimum_microbatches(num_ranks):
        problems.append(_too_few_microbatches(wanted))
    elif not wanted.allows_microbatches(num_ranks, num_microbatches):
        problems.append(_odd_microbatches(wanted))
    return tuple(problems)


def build_schedule(
    name: str, *, num_stages: int, num_ranks: int, num_microbatches: int
) -> Schedule:
    """Return schedule `name`; ConfigError if unknown, InfeasiblePlan if the numbers do not fit."""
    return builder_of(
        name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    ).schedule()


def builder_of(name: str, *, num_stages: int, num_ranks: int, num_microbatches: int) -> Builder:
    """Return the builder of schedule `name`, for its closed forms; errors as `build_schedule`."""
    problems = schedule_problems(
        name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    )
    if problems:
        raise (InfeasiblePlan if name in SCHEDULES else ConfigError)(problems)
    return SCHEDULES[name](
        num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    )


def unknown_schedule(name: str) -> Problem:
    """Return the problem of a name that no builder has, with names that it may mean."""
    close = did_you_mean(name, SCHEDULES)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    ordered = dict.fromkeys((*close, *SCHEDULES))
    return SCHEDULE_KNOWN.problem(
        f"{name!r} is not a schedule{hint}", key="pipeline.schedule", suggestions=ordered
    )


def _wrong_stages(wanted: Builder) -> Problem:
    num_stages, num_ranks = wanted.num_stages, wanted.num_ranks
    fitting = [
        wanted.stages_for(num_ranks, virtual)
        for virtual in range(1, _MOST_VIRTUAL_STAGES)
        if num_ranks >= 1 and wanted.fits_virtual_stages(virtual)
    ]
    nearest = sorted(sorted(fitting, key=lambda stages: abs(stages - num_stages))[:2])
    several = wanted.default_virtual_stages > 1
    return SCHEDULE_STAGES_PER_RANK.problem(
        f"{wanted.name} places {wanted.places}, but got {num_stages} stages for {num_ranks} ranks",
        key="pipeline.virtual_stages",
        suggestions=[
            *(
                f"{n} stages" + (f" (virtual_stages = {n // num_ranks})" if several else "")
                for n in nearest
            ),
            *_other_schedules(wanted),
        ],
    )


def _odd_ranks(wanted: Builder) -> Problem:
    p = wanted.num_ranks
    return SCHEDULE_EVEN_RANKS.problem(
        f"{wanted.name} pairs each rank with its mirror image, but pp = {p} leaves rank {p // 2} "
        f"alone ({p} % 2 = 1)",
        key="mesh.pp",
        suggestions=[
            *(f"mesh.pp = {n}" for n in (p - 1, p + 1) if wanted.fits_ranks(n)),
            *_other_schedules(wanted),
        ],
    )


def _too_few_microbatches(wanted: Builder) -> Problem:
    needed = _next_allowed(wanted, 0)
    on_ranks = "" if wanted.num_stages == wanted.num_ranks else f" on {wanted.num_ranks} ranks"
    return SCHEDULE_NEEDS_MICROBATCHES.problem(
        f"{wanted.name} with {wanted.num_stages} stages{on_ranks} needs at least {needed} "
        f"microbatches, but a step has {wanted.num_microbatches}",
        key="batch.microbatch_sequences",
        suggestions=[
            f"{needed} microbatches",
            f"{4 * needed} microbatches",
            *_other_schedules(wanted),
        ],
    )


def _odd_microbatches(wanted: Builder) -> Problem:
    multiple, count = wanted.microbatch_multiple, wanted.num_microbatches
    above = _next_allowed(wanted, count)
    nearest = (above - multiple, above)
    return SCHEDULE_EVEN_MICROBATCHES.problem(
        f"{wanted.name} lets half of the microbatches enter at each end, but a step has "
        f"{count} ({count} % {multiple} = {count % multiple})",
        key="batch.microbatch_sequences",
        suggestions=[
            *(
                f"{m} microbatches"
                for m in nearest
                if wanted.allows_microbatches(wanted.num_ranks, m)
            ),
            *_other_schedules(wanted),
        ],
    )


def _next_allowed(wanted: Builder, num_microbatches: int) -> int:
    """Return the fewest microbatches that are allowed and no fewer than these."""
    least = max(wanted.minimum_microbatches(wanted.num_ranks), num_microbatches)
    return -(-least // wanted.microbatch_multiple) * wanted.microbatch_multiple


def _other_schedules(wanted: Builder) -> list[str]:
    """Return the schedules that these numbers do fit."""
    return [
        f"schedule = {other!r}"
        for other, builder in SCHEDULES.items()
        if builder.fits_stages(wanted.num_stages, wanted.num_ranks)
        and builder.allows_microbatches(wanted.num_ranks, wanted.num_microbatches)
    ]
