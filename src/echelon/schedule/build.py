"""Build a schedule by name. A new schedule is one file with a `Builder`, and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.rulebook.schedule import (
    SCHEDULE_EVEN_MICROBATCHES,
    SCHEDULE_EVEN_RANKS,
    SCHEDULE_KNOWN,
    SCHEDULE_NEEDS_MICROBATCHES,
    SCHEDULE_STAGES_PER_RANK,
)
from echelon.core.rules import did_you_mean
from echelon.schedule.action import Schedule
from echelon.schedule.breadth_first import BreadthFirst
from echelon.schedule.builder import Builder
from echelon.schedule.dualpipe import DualPipe
from echelon.schedule.dualpipe_v import DualPipeV
from echelon.schedule.gpipe import GPipe
from echelon.schedule.interleaved import Interleaved
from echelon.schedule.naive import Naive
from echelon.schedule.one_f_one_b import OneFOneB
from echelon.schedule.zero_bubble_h1 import ZeroBubbleH1
from echelon.schedule.zero_bubble_h2 import ZeroBubbleH2
from echelon.schedule.zero_bubble_v import ZeroBubbleV

SCHEDULES: Mapping[str, type[Builder]] = MappingProxyType(
    {
        builder.name: builder
        for builder in (
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
        )
    }
)
"""The builder of each schedule, by the name that `pipeline.schedule` takes."""

_MOST_VIRTUAL_STAGES = 64


def minimum_microbatches(name: str, num_ranks: int) -> int:
    """Return the fewest microbatches that schedule `name` accepts; ConfigError if unknown."""
    return _builder(name).minimum_microbatches(num_ranks)


def schedule_problems(
    name: str, *, num_stages: int, num_ranks: int, num_microbatches: int
) -> tuple[Problem, ...]:
    """Return everything that stops schedule `name` from being built with these numbers."""
    if name not in SCHEDULES:
        return (_unknown(name),)
    builder = SCHEDULES[name]
    if num_ranks >= 1 and not builder.fits_ranks(num_ranks):
        problems = [_odd_ranks(name, num_stages, num_ranks, num_microbatches)]
    elif not builder.fits_stages(num_stages, num_ranks):
        problems = [_wrong_stages(name, num_stages, num_ranks, num_microbatches)]
    else:
        problems = []
    if num_microbatches < builder.minimum_microbatches(num_ranks):
        problems.append(_too_few_microbatches(name, num_stages, num_ranks, num_microbatches))
    elif not builder.allows_microbatches(num_ranks, num_microbatches):
        problems.append(_odd_microbatches(name, num_stages, num_ranks, num_microbatches))
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
    builder = _builder(name)
    problems = schedule_problems(
        name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
    )
    if problems:
        raise InfeasiblePlan(problems)
    return builder(num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches)


def _builder(name: str) -> type[Builder]:
    if name not in SCHEDULES:
        raise ConfigError(_unknown(name))
    return SCHEDULES[name]


def _unknown(name: str) -> Problem:
    close = did_you_mean(name.lower(), SCHEDULES)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return SCHEDULE_KNOWN.problem(
        f"{name!r} is not a schedule{hint}", key="pipeline.schedule", works=SCHEDULES
    )


def _wrong_stages(name: str, num_stages: int, num_ranks: int, num_microbatches: int) -> Problem:
    builder = SCHEDULES[name]
    fitting = [
        builder.stages_for(num_ranks, virtual)
        for virtual in range(1, _MOST_VIRTUAL_STAGES)
        if num_ranks >= 1 and builder.fits_virtual_stages(virtual)
    ]
    nearest = sorted(sorted(fitting, key=lambda stages: abs(stages - num_stages))[:2])
    return SCHEDULE_STAGES_PER_RANK.problem(
        f"{name} places {builder.places}, but there are {num_stages} stages for {num_ranks} ranks",
        key="pipeline.virtual_stages",
        works=[
            *(
                f"{stages} stages (virtual_stages = {stages // num_ranks})"
                if builder.default_virtual_stages > 1
                else f"{stages} stages"
                for stages in nearest
            ),
            *_other_schedules(num_stages, num_ranks, num_microbatches),
        ],
    )


def _odd_ranks(name: str, num_stages: int, num_ranks: int, num_microbatches: int) -> Problem:
    nearest = [n for n in (num_ranks - 1, num_ranks + 1) if SCHEDULES[name].fits_ranks(n)]
    return SCHEDULE_EVEN_RANKS.problem(
        f"{name} pairs each rank with its mirror image, but pp = {num_ranks} leaves rank "
        f"{num_ranks // 2} alone ({num_ranks} % 2 = 1)",
        key="mesh.pp",
        works=[
            *(f"mesh.pp = {n}" for n in nearest),
            *_other_schedules(num_stages, num_ranks, num_microbatches),
        ],
    )


def _too_few_microbatches(
    name: str, num_stages: int, num_ranks: int, num_microbatches: int
) -> Problem:
    needed = _next_allowed(name, num_ranks, 0)
    on_ranks = "" if num_stages == num_ranks else f" on {num_ranks} ranks"
    return SCHEDULE_NEEDS_MICROBATCHES.problem(
        f"{name} with {num_stages} stages{on_ranks} needs at least {needed} microbatches, "
        f"but a step has {num_microbatches}",
        key="batch.microbatch_sequences",
        works=[
            f"{needed} microbatches",
            f"{4 * needed} microbatches",
            *_other_schedules(num_stages, num_ranks, num_microbatches),
        ],
    )


def _odd_microbatches(name: str, num_stages: int, num_ranks: int, num_microbatches: int) -> Problem:
    multiple = SCHEDULES[name].microbatch_multiple
    above = _next_allowed(name, num_ranks, num_microbatches)
    nearest = [
        m for m in (above - multiple, above) if SCHEDULES[name].allows_microbatches(num_ranks, m)
    ]
    return SCHEDULE_EVEN_MICROBATCHES.problem(
        f"{name} lets half of the microbatches enter at each end, but a step has "
        f"{num_microbatches} ({num_microbatches} % {multiple} = {num_microbatches % multiple})",
        key="batch.microbatch_sequences",
        works=[
            *(f"{m} microbatches" for m in nearest),
            *_other_schedules(num_stages, num_ranks, num_microbatches),
        ],
    )


def _next_allowed(name: str, num_ranks: int, num_microbatches: int) -> int:
    """Return the fewest microbatches that `name` allows and that are no fewer than these."""
    builder = SCHEDULES[name]
    least = max(builder.minimum_microbatches(num_ranks), num_microbatches)
    return -(-least // builder.microbatch_multiple) * builder.microbatch_multiple


def _other_schedules(num_stages: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Return the schedules that these numbers do fit."""
    return [
        f"schedule = {other!r}"
        for other, builder in SCHEDULES.items()
        if builder.fits_stages(num_stages, num_ranks)
        and builder.allows_microbatches(num_ranks, num_microbatches)
    ]
