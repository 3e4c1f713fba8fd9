# SPDX-License-Identifier: Apache-2.0
"""The schedule that `echelon schedule` is asked for, and flags to type instead of wrong ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isqrt, prod
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import bad_argument
from echelon.config.automatic import stage_placements
from echelon.config.reading import is_file
from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.core.rulebook.pipeline import SCHEDULE_WITHIN_MEMORY
from echelon.core.rulebook.planner import PREDICTION_IN_RANGE
from echelon.schedule.action import Schedule
from echelon.schedule.automatic import find_schedule
from echelon.schedule.build import SCHEDULES, build_schedule, schedule_problems
from echelon.schedule.check import ScheduleReport, check_schedule, peak_in_flight_per_rank
from echelon.schedule.files import ScheduleFile, read_schedule_file
from echelon.schedule.rows import NO_FILE, ActionCells
from echelon.schedule.simulate import Durations

SUFFIXES = (".csv", ".json")
SEARCH = "auto"
_SHORTEST = 1e-9  # in the unit of --slots
_LONGEST = 1e9  # in the unit of --slots
"""Times further apart than this are none that one drawing shows, or that add up."""

MostInFlight = Annotated[
    str | None,
    Parameter(
        help="The most (stage, microbatch) pairs whose activations a rank may hold: N, or one per "
        "rank as N,N,..."
    ),
]
"""A memory limit, as it is typed."""

_MOST = {"pp": 1024, "microbatches": 8192, "virtual-stages": 64}
"""The most of each flag."""
MOST_DRAWN = 2**15
"""So many forward passes of a stage are built, checked, simulated and drawn in some seconds."""
MOST_SEARCHED = 2**13
"""A search goes through all actions many times."""
_FARTHEST = 64
"""So far from a number that does not work another is looked for."""
_MOST_OTHERS = 3  # names in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTimes:
    """How many slots each kind of action, and a transfer, takes on every stage."""

    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float

    @classmethod
    def parse(cls, text: str) -> SlotTimes:
        """Return what `--slots` says; ConfigError where it is not four times."""
        try:
            values = [float(word) for word in text.split(",")]
        except ValueError:
            values = []
        good = all(value == 0 or _SHORTEST <= value <= _LONGEST for value in values)
        if len(values) not in (3, 4) or not good or sum(values[:3]) <= 0:
            raise bad_argument(
                f"--slots {text!a} is not F,B,W,transfer: times that are 0 or {_SHORTEST:g} to "
                f"{_LONGEST:g}, not all 0",
                "--slots 1,1,1,0",
                "--slots 1,1,1,0.2",
            )
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, (*values, 0.0)[:4], strict=True)))

    def shortest(self) -> float:
        """Return the time of the shortest action that takes any."""
        return min(t for t in (self.forward, self.input_gradient, self.weight_gradient) if t > 0)

    def durations(self, num_stages: int) -> Durations:
        """Return the same times for every stage."""
        return Durations(
            forward_s=(self.forward,) * num_stages,
            backward_s=(self.input_gradient + self.weight_gradient,) * num_stages,
            input_gradient_s=(self.input_gradient,) * num_stages,
            weight_gradient_s=(self.weight_gradient,) * num_stages,
            transfer_s=(self.transfer,) * (num_stages - 1),
        )

    def __str__(self) -> str:
        """Return the times as the head of the drawing says them."""
        whole = self.input_gradient + self.weight_gradient
        return (
            f"F {self.forward:g}, B {self.input_gradient:g}, W {self.weight_gradient:g}, "
            f"BW {whole:g}, transfer {self.transfer:g} slots"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleArguments:
    """What was typed."""

    text: str
    pp: int | None
    microbatches: int | None
    virtual_stages: int | None
    most_in_flight: str | None
    times: SlotTimes

    def require_numbers(self) -> tuple[int, int]:
        """Return the ranks and the microbatches; ConfigError where one is missing."""
        if self.pp is None or self.microbatches is None:
            missing = "--pp (-p)" if self.pp is None else "--microbatches (-m)"
            works = f"{self.text} -p {self.pp or 4} -m {self.microbatches or 8}"
            raise bad_argument(f"{self.text} needs {missing}", f"echelon schedule show {works}")
        return self.pp, self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSchedule:
    """A schedule, the limits that it was asked to keep, and how short a search could make it.

    `cells` names the actions of a schedule that was read from a file.
    """

    schedule: Schedule
    cells: ActionCells = NO_FILE
    limits: tuple[int, ...] | None
    lower_bound: float | None = None


def choose_schedule(wanted: ScheduleArguments) -> ChosenSchedule:
    """Return the schedule of a name, in a file, or found by search, unchecked.

    ConfigError where the flags do not fit.
    """
    path = Path(wanted.text)
    is_there = is_file(path) or os.path.isdir(path)
    is_path = path.suffix.lower() in SUFFIXES or path.parent != Path() or is_there
    if wanted.text == SEARCH:
        return _searched(wanted)
    if wanted.text in SCHEDULES or not is_path:
        schedule, cells = _built(wanted), NO_FILE
    else:
        found = _read(wanted, path)
        schedule, cells = found.schedule, found.cells
    limits = limits_of(wanted.most_in_flight, schedule.num_ranks)
    return ChosenSchedule(schedule=schedule, cells=cells, limits=limits)


def limits_of(text: str | None, num_ranks: int) -> tuple[int, ...] | None:
    """Return the limit of each rank; ConfigError where the flag says something else."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= 9 for word in words):
        wrong = "is not a count, or counts separated by commas"
    elif len(words) not in (1, num_ranks):
        wrong = f"has {len(words)} counts, but the schedule has {num_ranks} ranks"
    else:
        counts = tuple(int(word) for word in words)
        return counts * num_ranks if len(counts) == 1 else counts
    each = [",".join(["4"] * num_ranks)] if 1 < num_ranks <= 16 else []
    suggestions = (f"--most-in-flight {limit}" for limit in ("4", *each))
    raise bad_argument(f"--most-in-flight {text!a} {wrong}", *suggestions)


def checked_schedule(
    schedule: Schedule, limits: tuple[int, ...] | None, cells: ActionCells = NO_FILE
) -> ScheduleReport:
    """Return what is proved of a schedule; InfeasiblePlan names flags that work instead."""
    try:
        return check_schedule(schedule, most_in_flight=limits, cells=cells)
    except InfeasiblePlan as error:
        raise with_working_limits(error, schedule) from error


def _read(wanted: ScheduleArguments, path: Path) -> ScheduleFile:
    given = {
        "--pp": wanted.pp,
        "--microbatches": wanted.microbatches,
        "--virtual-stages": wanted.virtual_stages,
    }
    if extra := [flag for flag, value in given.items() if value is not None]:
        text = f"{', '.join(extra)}: what a file holds is as it is"
        raise bad_argument(text, f"echelon schedule show {path}")
    return read_schedule_file(path)


def _built(wanted: ScheduleArguments) -> Schedule:
    if wanted.text not in SCHEDULES:
        return build_schedule(wanted.text, num_stages=1, num_ranks=1, num_microbatches=1)
    pp, microbatches = wanted.require_numbers()
    builder, virtual = SCHEDULES[wanted.text], wanted.virtual_stages
    virtual = builder.default_virtual_stages if virtual is None else virtual
    # What is below 1 is refused by the schedule's own rules, which know what it needs.
    asked = {"pp": pp, "microbatches": microbatches, "virtual_stages": virtual}
    least = {name: max(number, 1) for name, number in asked.items()}
    require_size(**least, most_passes=MOST_DRAWN)
    stages = builder.stages_for(pp, virtual)
    try:
        return build_schedule(
            wanted.text, num_stages=stages, num_ranks=pp, num_microbatches=microbatches
        )
    except InfeasiblePlan as error:
        raise with_working_flags(error, wanted.text, **asked) from error


def _searched(wanted: ScheduleArguments) -> ChosenSchedule:
    """Return the best schedule that a search finds, with two stages on a rank in turn or as a V."""
    ranks, microbatches = wanted.require_numbers()
    virtual = 1 if wanted.virtual_stages is None else wanted.virtual_stages
    require_size(
        pp=ranks, microbatches=microbatches, virtual_stages=virtual, most_passes=MOST_SEARCHED
    )
    # Without a limit a rank may hold what 1F1B makes it hold at most, as in a run.
    limits = limits_of(wanted.most_in_flight, ranks) or (ranks * virtual,) * ranks
    durations = wanted.times.durations(ranks * virtual)
    try:
        found = [
            find_schedule(placement, microbatches, durations, most_in_flight=limits)
            for placement in stage_placements(ranks, virtual)
        ]
    except InfeasiblePlan as error:
        works = limit_flags([max(limit, virtual) for limit in limits])
        problems = [replace(one, suggestions=works) for one in error.problems]
        raise InfeasiblePlan(problems) from error
    best = min(found, key=lambda one: one.makespan_s)
    bound = min(one.lower_bound_s for one in found)
    return ChosenSchedule(schedule=best.schedule, limits=limits, lower_bound=bound)


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
