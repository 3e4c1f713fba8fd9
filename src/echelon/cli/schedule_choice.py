"""Which schedule `echelon schedule` is asked for: a named one, one from a search, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.core.errors import ConfigError
from echelon.core.rulebook.command_line import BAD_ARGUMENT

if TYPE_CHECKING:
    from echelon.schedule.action import Schedule
    from echelon.schedule.simulate import Durations

SUFFIXES = (".csv", ".json")
SEARCH = "auto"

MostInFlight = Annotated[
    str | None,
    Parameter(
        show_default=False,
        help="The most (stage, microbatch) pairs whose activations a rank may hold: N, or one per "
        "rank as N,N,...",
    ),
]
"""A memory limit, as it is typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How many slots each kind of action, and a transfer, takes on every stage."""

    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float

    @classmethod
    def parse(cls, text: str) -> Times:
        """Return what `--times` says; ConfigError where it is not four times."""
        try:
            values = [float(word) for word in text.split(",")]
        except ValueError:
            values = []
        good = all(isfinite(value) and 0 <= value <= 1e9 for value in values)
        if len(values) not in (3, 4) or not good or sum(values[:3]) <= 0:
            raise _bad_argument(
                f"--times {text!a} is not F,B,W,transfer: times that are 0 or more, not all 0",
                ["1,1,1,0", "1,1,1,0.2"],
            )
        forward, input_gradient, weight_gradient, transfer = (*values, 0.0)[:4]
        return cls(
            forward=forward,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            transfer=transfer,
        )

    def durations(self, num_stages: int) -> Durations:
        """Return the same times for every stage."""
        from echelon.schedule.simulate import Durations

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
class Wanted:
    """What was typed."""

    text: str
    pp: int | None
    microbatches: int | None
    virtual_stages: int | None
    most_in_flight: str | None
    times: Times

    def require_numbers(self) -> tuple[int, int]:
        """Return the ranks and the microbatches; ConfigError where one is missing."""
        if self.pp is None or self.microbatches is None:
            missing = "--pp (-p)" if self.pp is None else "--microbatches (-m)"
            numbers = f"-p {self.pp or 4} -m {self.microbatches or 8}"
            works = [f"echelon schedule show {self.text} {numbers}"]
            raise _bad_argument(f"{self.text} needs {missing}", works)
        return self.pp, self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A schedule, the limits that it was asked to keep, and how short a search could make it."""

    schedule: Schedule
    limits: tuple[int, ...] | None
    lower_bound: float | None = None


def choose(wanted: Wanted) -> Chosen:
    """Return the schedule of a name, in a file, or found by search, unchecked.

    ConfigError where the flags do not fit.
    """
    from echelon.config.files import is_file
    from echelon.schedule.build import SCHEDULES

    path = Path(wanted.text)
    is_path = path.suffix.lower() in SUFFIXES or path.parent != Path() or is_file(path)
    if wanted.text == SEARCH:
        return _searched(wanted)
    is_named = wanted.text in SCHEDULES or not is_path
    schedule = _built(wanted) if is_named else _read(wanted, path)
    return Chosen(schedule=schedule, limits=limits_of(wanted.most_in_flight, schedule.num_ranks))


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
    works = ["4", ",".join(["4"] * num_ranks)] if 1 <= num_ranks <= 16 else ["4"]
    raise _bad_argument(f"--most-in-flight {text!a} {wrong}", works)


def _read(wanted: Wanted, path: Path) -> Schedule:
    from echelon.schedule.files import read_schedule

    given = {
        "--pp": wanted.pp,
        "--microbatches": wanted.microbatches,
        "--virtual-stages": wanted.virtual_stages,
    }
    if extra := [flag for flag, value in given.items() if value is not None]:
        text = f"{', '.join(extra)}: what a file holds is as it is"
        raise _bad_argument(text, [f"echelon schedule show {path}"])
    return read_schedule(path)


def _built(wanted: Wanted) -> Schedule:
    from echelon.schedule.build import SCHEDULES, build_schedule

    if wanted.text not in SCHEDULES:
        return build_schedule(wanted.text, num_stages=1, num_ranks=1, num_microbatches=1)
    ranks, microbatches = wanted.require_numbers()
    builder, virtual = SCHEDULES[wanted.text], wanted.virtual_stages
    stages = builder.stages_for(
        ranks, builder.default_virtual_stages if virtual is None else virtual
    )
    return build_schedule(
        wanted.text, num_stages=stages, num_ranks=ranks, num_microbatches=microbatches
    )


def _searched(wanted: Wanted) -> Chosen:
    """Return the best schedule that a search finds, with two stages on a rank in turn or as a V."""
    from echelon.config.placement import stage_placements
    from echelon.schedule.automatic import find_schedule

    ranks, microbatches = wanted.require_numbers()
    virtual = 1 if wanted.virtual_stages is None else wanted.virtual_stages
    if min(ranks, microbatches, virtual) < 1:
        numbers = f"{ranks} ranks, {microbatches} microbatches and {virtual} stages per rank"
        raise _bad_argument(f"{numbers}; each must be at least 1", ["-p 4 -m 8 -v 1"])
    # Without a limit a rank may hold what 1F1B makes it hold at most, as in a run.
    limits = limits_of(wanted.most_in_flight, ranks) or (ranks * virtual,) * ranks
    durations = wanted.times.durations(ranks * virtual)
    found = [
        find_schedule(placement, microbatches, durations, most_in_flight=limits)
        for placement in stage_placements(ranks, virtual)
    ]
    best = min(found, key=lambda one: one.makespan_s)
    bound = min(one.lower_bound_s for one in found)
    return Chosen(schedule=best.schedule, limits=limits, lower_bound=bound)


def _bad_argument(message: str, works: Sequence[str]) -> ConfigError:
    problem = BAD_ARGUMENT.problem(message, set_by="the command line", works=works)
    return ConfigError(problem)
