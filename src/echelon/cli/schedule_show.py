"""`echelon schedule show`: draw a schedule, and say what it costs in time, memory and messages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json
from echelon.cli.output import note, print_json
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.command_line import BAD_ARGUMENT

if TYPE_CHECKING:
    from echelon.schedule.action import Schedule
    from echelon.schedule.check import ScheduleReport
    from echelon.schedule.simulate import Durations, Simulation

SUFFIXES = (".csv", ".json")
_WIDEST_SLOT = 6


def show(
    schedule: Annotated[str, Parameter(help="A schedule such as 1f1b, or a CSV or JSON file.")],
    /,
    *,
    pp: Annotated[
        int | None, Parameter(name=("--pp", "-p"), show_default=False, help="Pipeline ranks.")
    ] = None,
    microbatches: Annotated[
        int | None,
        Parameter(name=("--microbatches", "-m"), show_default=False, help="Microbatches of a step"),
    ] = None,
    virtual_stages: Annotated[
        int | None,
        Parameter(name=("--virtual-stages", "-v"), show_default=False, help="Stages per rank."),
    ] = None,
    times: Annotated[
        str, Parameter(help="How long F, B, W and a transfer take: F,B,W,transfer. BW is B + W.")
    ] = "1,1,1,0",
    svg: Annotated[
        Path | None, Parameter(show_default=False, help="Write the figure to this new file.")
    ] = None,
    csv: Annotated[
        Path | None, Parameter(show_default=False, help="Write the cells to this new file.")
    ] = None,
    json: Json = False,
) -> int:
    """Draw a schedule with its bubble, what its ranks hold, and what they send."""
    from echelon.config.new_file import write_new
    from echelon.schedule.check import check_schedule
    from echelon.schedule.files import schedule_csv
    from echelon.schedule.simulate import simulate
    from echelon.schedule.svg import timeline_svg

    seconds = _Times.parse(times)
    found = _find(schedule, pp, microbatches, virtual_stages)
    report = check_schedule(found)
    shown = _Shown(
        schedule=found,
        report=report,
        simulation=simulate(found, seconds.durations(found.num_stages)),
        times=seconds,
    )
    if svg is not None:
        figure = timeline_svg(shown.simulation.events, title=shown.title(), unit="slots")
        write_new(svg, figure, key="--svg")
    if csv is not None:
        write_new(csv, schedule_csv(found), key="--csv")
    if json:
        print_json("schedule show", shown.to_json())
    else:
        print("\n".join(shown.lines(shutil.get_terminal_size((100, 24)).columns)))
    for written in (svg, csv):
        if written is not None:
            note(f"written: {written}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """How many slots each kind of action, and a transfer, takes on every stage."""

    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float

    @classmethod
    def parse(cls, text: str) -> _Times:
        """Return what `--times` says; ConfigError where it is not four times."""
        try:
            values = [float(word) for word in text.split(",")]
        except ValueError:
            values = []
        good = all(isfinite(value) and 0 <= value <= 1e9 for value in values)
        if len(values) not in (3, 4) or not good or sum(values[:3]) <= 0:
            problem = BAD_ARGUMENT.problem(
                f"--times {text!a} is not F,B,W,transfer: times that are 0 or more, not all 0",
                set_by="the command line",
                works=["1,1,1,0", "1,1,1,0.2"],
            )
            raise ConfigError(problem)
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
class _Shown:
    """A schedule with all that is said of it."""

    schedule: Schedule
    report: ScheduleReport
    simulation: Simulation
    times: _Times

    def title(self) -> str:
        """Return the line over the figure."""
        bubble = f"bubble {100 * self.simulation.bubble_fraction:.1f} %"
        return f"{self._what()}; {bubble}, makespan {self.simulation.makespan_s:g} slots"

    def lines(self, columns: int) -> Iterator[str]:
        """Yield the drawing and the facts."""
        from echelon.schedule.build import SCHEDULES
        from echelon.schedule.draw import KEY, draw_timeline

        report, simulation = self.report, self.simulation
        yield f"{self._what()}; {self.times}"
        if self.schedule.name in SCHEDULES:
            yield SCHEDULES[self.schedule.name].paper
        yield ""
        yield draw_timeline(simulation.events, self._width(columns), unit="slots") + KEY + "\n"
        busy = sum(simulation.busy_s) / len(simulation.busy_s)
        fraction, overhead = simulation.bubble_fraction, simulation.bubble_overhead
        for name, text in (
            ("makespan", f"{simulation.makespan_s:g} slots, {busy:g} of them busy"),
            ("bubble", f"{100 * fraction:.2f} % of the step, {100 * overhead:.2f} % of the work"),
            ("in flight", f"{_numbers(report.peak_in_flight_per_rank)} at most on each rank"),
            ("messages", f"{report.num_messages}, {report.send_window} pending on a channel"),
        ):
            yield f"{name:<11}{text}"

    def to_json(self) -> dict[str, object]:
        """Return the facts, and the rows of all ranks."""
        schedule, report, simulation = self.schedule, self.report, self.simulation
        return {
            "name": schedule.name,
            "num_ranks": schedule.num_ranks,
            "num_stages": schedule.num_stages,
            "num_microbatches": schedule.num_microbatches,
            "stage_ranks": list(schedule.stage_ranks),
            "mirrored": list(schedule.mirrored),
            "makespan": simulation.makespan_s,
            "idle_per_rank": list(simulation.idle_s),
            "bubble_fraction": simulation.bubble_fraction,
            "bubble_overhead": simulation.bubble_overhead,
            "peak_in_flight_per_rank": list(report.peak_in_flight_per_rank),
            "peak_in_flight_per_stage": list(report.peak_in_flight_per_stage),
            "num_messages": report.num_messages,
            "send_window": report.send_window,
            "rows": [" ".join(str(action) for action in row) for row in schedule.actions],
        }

    def _what(self) -> str:
        schedule = self.schedule
        counts = f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
        stages = "" if schedule.num_stages == schedule.num_ranks else f"{schedule.num_stages} "
        return f"{schedule.name}: {stages and stages + 'stages on '}{counts}"

    def _width(self, columns: int) -> int:
        """Return a width in which a slot is a whole number of columns, if there is room for it."""
        margin = len(f"rank {self.schedule.num_ranks - 1}") + 2
        wide = min(floor((columns - margin) / self.simulation.makespan_s), _WIDEST_SLOT)
        return columns if wide < 1 else margin + floor(wide * self.simulation.makespan_s)


def _numbers(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _find(
    text: str, pp: int | None, microbatches: int | None, virtual_stages: int | None
) -> Schedule:
    """Return the schedule of that name, or in that file; ConfigError where flags do not fit."""
    from echelon.config.files import is_file
    from echelon.schedule.build import SCHEDULES, build_schedule
    from echelon.schedule.files import read_schedule

    path = Path(text)
    given = {"--pp": pp, "--microbatches": microbatches, "--virtual-stages": virtual_stages}
    named = path.suffix.lower() in SUFFIXES or path.parent != Path()
    if text not in SCHEDULES and (named or is_file(path)):
        if extra := [flag for flag, value in given.items() if value is not None]:
            text = f"{', '.join(extra)}: what a file holds is as it is"
            raise ConfigError(_bad_argument(text, [f"echelon schedule show {path}"]))
        return read_schedule(path)
    if text in SCHEDULES and (pp is None or microbatches is None):
        missing = "--pp (-p)" if pp is None else "--microbatches (-m)"
        works = [f"echelon schedule show {text} -p {pp or 4} -m {microbatches or 8}"]
        raise ConfigError(_bad_argument(f"{text} needs {missing}", works))
    virtual = virtual_stages
    if virtual is None:
        virtual = SCHEDULES[text].default_virtual_stages if text in SCHEDULES else 1
    ranks = pp or 0
    stages = SCHEDULES[text].stages_for(ranks, virtual) if text in SCHEDULES else ranks
    return build_schedule(
        text, num_stages=stages, num_ranks=ranks, num_microbatches=microbatches or 0
    )


def _bad_argument(message: str, works: Sequence[str]) -> Problem:
    return BAD_ARGUMENT.problem(message, set_by="the command line", works=works)
