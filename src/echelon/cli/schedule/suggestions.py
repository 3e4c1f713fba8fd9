# SPDX-License-Identifier: Apache-2.0
"""How large a pipeline may be asked about, and what to type instead of flags that do not work.

The limits of the numbers are the same for every command; one that goes through all actions limits
their product too: more ends in no answer, or no memory. Suggested flags were each tried out.

The rules of schedules speak of the keys of a run file; on this command line the same numbers are
flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod

from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.core.rulebook.pipeline import SCHEDULE_WITHIN_MEMORY
from echelon.core.rulebook.planner import PREDICTION_IN_RANGE
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.check import peak_in_flight_per_rank

_MOST = {"pp": 1024, "microbatches": 8192, "virtual-stages": 64}
"""The most of each flag."""
MOST_DRAWN = 2**15
"""So many forward passes of a stage are built, checked, simulated and drawn in some seconds."""
MOST_SEARCHED = 2**13
"""A search goes through all actions many times."""


def require_size(
    *, pp: int, microbatches: int, virtual_stages: int = 1, most_passes: int | None = None
) -> None:
    """Refuse numbers out of range, all of them at once; ConfigError names the nearest that works.

    `most_passes` limits how many forward passes the stages make together in a step.
    """
    asked = {"pp": pp, "microbatches": microbatches, "virtual-stages": virtual_stages}
    near = {flag: min(max(value, 1), _MOST[flag]) for flag, value in asked.items()}
    small = most_passes is None or prod(near.values()) <= most_passes
    fewer = [] if small else [_all_fewer(near, most_passes or 1)]
    problems = [
        PREDICTION_IN_RANGE.problem(
            f"--{flag} {value} is not in 1 to {_MOST[flag]}",
            set_by=f"--{flag} {value}",
            suggestions=fewer or [f"--{flag} {near[flag]}"],
        )
        for flag, value in asked.items()
        if value != near[flag]
    ]
    if not problems and not small:
        stages, passes = pp * virtual_stages, prod(asked.values())
        problems.append(
            PREDICTION_IN_RANGE.problem(
                f"{stages} stages x {microbatches} microbatches are {passes} forward passes; more "
                f"than {most_passes} are not gone through action by action",
                set_by=" ".join(f"--{flag} {value}" for flag, value in asked.items()),
                suggestions=_one_fewer(asked, most_passes or 1) or fewer,
            )
        )
    if problems:
        raise ConfigError(problems)


def _one_fewer(asked: Mapping[str, int], most_passes: int) -> list[str]:
    """Return what one number may be instead, if that is enough.

    Schedules want two microbatches a rank or more, and some of them even numbers.
    """
    pp, microbatches, virtual = asked.values()
    fewer_m = _even(most_passes // (pp * virtual))
    fewer_p = _even(most_passes // (microbatches * virtual))
    found = [f"--microbatches {fewer_m}"] if fewer_m >= 2 * pp else []
    return [*found, f"--pp {fewer_p}"] if 1 <= fewer_p <= microbatches // 2 else found


def _all_fewer(near: Mapping[str, int], most_passes: int) -> str:
    """Return numbers that are enough together, with two microbatches a rank or more."""
    pp, _, virtual = near.values()
    fewer_p = _even(min(pp, isqrt(most_passes // (2 * virtual))))
    fewer_m = _even(most_passes // (fewer_p * virtual))
    stages = f" --virtual-stages {virtual}" if virtual > 1 else ""
    return f"--pp {fewer_p} --microbatches {min(fewer_m, _MOST['microbatches'])}{stages}"


def _even(number: int) -> int:
    return number - number % 2 if number > 1 else number


_FARTHEST = 64
"""So far from a number that does not work another is looked for."""
_MOST_OTHERS = 3  # names in a message


def with_working_flags(
    error: InfeasiblePlan, name: str, *, pp: int, microbatches: int, virtual_stages: int
) -> InfeasiblePlan:
    """Return the same error of building schedule `name`, with flags that do work."""

    def fits(p: int, m: int, v: int, other: str = name) -> bool:
        stages = SCHEDULES[other].stages_for(p, v)
        return not schedule_problems(other, num_stages=stages, num_ranks=p, num_microbatches=m)

    p, m, v = max(pp, 1), max(microbatches, 1), max(virtual_stages, 1)
    suggestions = [
        *(f"-m {n}" for n in _near(m, lambda n: fits(pp, n, virtual_stages))),
        *(f"-p {n}" for n in _near(p, lambda n: fits(n, microbatches, virtual_stages))),
        *(f"--virtual-stages {n}" for n in _near(v, lambda n: fits(pp, microbatches, n))),
    ]
    others = [other for other in SCHEDULES if fits(pp, microbatches, virtual_stages, other)]
    suggestions += [
        f"echelon schedule show {o} -p {pp} -m {microbatches}" for o in others[:_MOST_OTHERS]
    ]
    if not suggestions:
        builder = SCHEDULES[name]
        default = builder.default_virtual_stages
        p = next(_near(p, lambda n: builder.fits_ranks(n) and n > 1), 2)
        m = next(_near(max(m, 2 * p), lambda n: fits(p, n, default)), 2 * p)
        suggestions = [f"echelon schedule show {name} -p {p} -m {m}"]
    return InfeasiblePlan([replace(one, suggestions=tuple(suggestions)) for one in error.problems])


def with_working_limits(error: InfeasiblePlan, schedule: Schedule) -> InfeasiblePlan:
    """Return the same error of checking `schedule`, with memory limits that it keeps."""
    if SCHEDULE_WITHIN_MEMORY.id not in error.rules:
        return error
    works = limit_flags(peak_in_flight_per_rank(schedule))
    return InfeasiblePlan([replace(one, suggestions=works) for one in error.problems])


def limit_flags(limits: Sequence[int]) -> tuple[str, ...]:
    """Return the flag with one limit for all ranks, and the one with a limit for each."""
    each = f"--most-in-flight {','.join(map(str, limits))}"
    same = f"--most-in-flight {max(limits)}"
    return (same,) if len(set(limits)) == 1 else (same, each)


def _near(number: int, fits: Callable[[int], bool]) -> Iterator[int]:
    """Yield the nearest number from 1 up that fits, below and above."""
    below = range(number, max(number - _FARTHEST, 0), -1)
    above = range(number + 1, number + _FARTHEST)
    for numbers in (below, above):
        yield from (n for n in [next(filter(fits, numbers), None)] if n is not None)
