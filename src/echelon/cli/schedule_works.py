"""What works instead of flags of `echelon schedule` that do not: flags to type, each tried out.

The rules of schedules speak of the keys of a run file; on this command line the same numbers are
flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from echelon.core.errors import InfeasiblePlan
from echelon.core.rulebook.schedule_file import SCHEDULE_WITHIN_MEMORY
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.check import peak_in_flight_per_rank

_FARTHEST = 64
"""So far from a number that does not work another is looked for."""
_MOST_OTHERS = 3


def with_flags(
    error: InfeasiblePlan, name: str, *, pp: int, microbatches: int, virtual_stages: int
) -> InfeasiblePlan:
    """Return the same error of building schedule `name`, with flags that do work."""

    def fits(p: int, m: int, v: int, other: str = name) -> bool:
        stages = SCHEDULES[other].stages_for(p, v)
        return not schedule_problems(other, num_stages=stages, num_ranks=p, num_microbatches=m)

    p, m, v = max(pp, 1), max(microbatches, 1), max(virtual_stages, 1)
    works = [
        *(f"-m {n}" for n in _near(m, lambda n: fits(pp, n, virtual_stages))),
        *(f"-p {n}" for n in _near(p, lambda n: fits(n, microbatches, virtual_stages))),
        *(f"-v {n}" for n in _near(v, lambda n: fits(pp, microbatches, n))),
    ]
    others = [other for other in SCHEDULES if fits(pp, microbatches, virtual_stages, other)]
    works += [f"echelon schedule show {o} -p {pp} -m {microbatches}" for o in others[:_MOST_OTHERS]]
    if not works:
        builder = SCHEDULES[name]
        default = builder.default_virtual_stages
        p = next(_near(p, lambda n: builder.fits_ranks(n) and n > 1), 2)
        m = next(_near(max(m, 2 * p), lambda n: fits(p, n, default)), 2 * p)
        works = [f"echelon schedule show {name} -p {p} -m {m}"]
    return InfeasiblePlan([replace(one, works=tuple(works)) for one in error.problems])


def with_limits(error: InfeasiblePlan, schedule: Schedule) -> InfeasiblePlan:
    """Return the same error of checking `schedule`, with memory limits that it keeps."""
    if SCHEDULE_WITHIN_MEMORY.id not in error.rules:
        return error
    peaks = peak_in_flight_per_rank(schedule)
    works = limit_flags(peaks)
    return InfeasiblePlan([replace(one, works=works) for one in error.problems])


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
