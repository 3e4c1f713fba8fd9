"""Build a schedule by name. A new schedule is one file with a `Builder`, and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from echelon.core.errors import ConfigError, InfeasiblePlan, Problem
from echelon.core.rulebook.schedule import (
    SCHEDULE_KNOWN,
    SCHEDULE_NEEDS_MICROBATCHES,
    SCHEDULE_STAGES_PER_RANK,
)
from echelon.core.rules import did_you_mean
from echelon.schedule.action import Schedule
from echelon.schedule.builder import Builder
from echelon.schedule.gpipe import GPipe
from echelon.schedule.naive import Naive
from echelon.schedule.one_f_one_b import OneFOneB

SCHEDULES: Mapping[str, type[Builder]] = MappingProxyType(
    {builder.name: builder for builder in (Naive, GPipe, OneFOneB)}
)
"""The builder of each schedule, by the name that `pipeline.schedule` takes."""


def minimum_microbatches(name: str, num_stages: int) -> int:
    """Return the fewest microbatches that schedule `name` accepts; ConfigError if unknown."""
    return _builder(name).minimum_microbatches(num_stages)


def schedule_problems(
    name: str, *, num_stages: int, num_ranks: int, num_microbatches: int
) -> tuple[Problem, ...]:
    """Return everything that stops schedule `name` from being built with these numbers."""
    if name not in SCHEDULES:
        return (_unknown(name),)
    builder = SCHEDULES[name]
    problems: list[Problem] = []
    if not builder.fits_stages(num_stages, num_ranks):
        problems.append(
            SCHEDULE_STAGES_PER_RANK.problem(
                f"{name} places one stage on each pipeline rank, but there are "
                f"{num_stages} stages for {num_ranks} ranks",
                key="pipeline.virtual_stages",
                works=[f"{num_ranks} stages"] if num_ranks >= 1 else [],
            )
        )
    needed = builder.minimum_microbatches(num_stages)
    if num_microbatches < needed:
        problems.append(
            SCHEDULE_NEEDS_MICROBATCHES.problem(
                f"{name} with {num_stages} stages needs at least {needed} microbatches, "
                f"but a step has {num_microbatches}",
                key="batch.microbatch_sequences",
                works=_enough(name, num_stages, num_microbatches),
            )
        )
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


def _enough(name: str, num_stages: int, num_microbatches: int) -> list[str]:
    needed = SCHEDULES[name].minimum_microbatches(num_stages)
    others = [
        f"schedule = {other!r}"
        for other, builder in SCHEDULES.items()
        if builder.minimum_microbatches(num_stages) <= num_microbatches
    ]
    return [f"{needed} microbatches", f"{4 * needed} microbatches", *others]
