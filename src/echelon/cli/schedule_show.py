"""`echelon schedule show`: draw a schedule, and say what it costs in time, memory and messages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json
from echelon.cli.new_files import require_new_files
from echelon.cli.output import note, print_json
from echelon.cli.schedule_choice import MostInFlight, Times, Wanted, checked, choose

if TYPE_CHECKING:
    from echelon.schedule.action import Schedule
    from echelon.schedule.check import ScheduleReport
    from echelon.schedule.simulate import Simulation

_WIDEST_SLOT = 6


def show(
    schedule: Annotated[
        str, Parameter(help="A schedule such as 1f1b, auto to search one, or a file.")
    ],
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
    most_in_flight: MostInFlight = None,
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
    from echelon.schedule.files import schedule_csv
    from echelon.schedule.simulate import simulate
    from echelon.schedule.svg import timeline_svg

    wanted = Wanted(
        text=schedule,
        pp=pp,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        most_in_flight=most_in_flight,
        times=Times.parse(times),
    )
    require_new_files({"--svg": svg, "--csv": csv})
    chosen = choose(wanted)
    found = chosen.schedule
    shown = _Shown(
        schedule=found,
        report=checked(found, chosen.limits, chosen.cells),
        simulation=simulate(found, wanted.times.durations(found.num_stages)),
        times=wanted.times,
        lower_bound=chosen.lower_bound,
    )
    # Both texts are made before either is written: what goes wrong leaves no file behind.
    figure = timeline_svg(shown.simulation.events, title=shown.title(), unit="slots") if svg else ""
    cells = schedule_csv(found) if csv else ""
    if svg is not None:
        write_new(svg, figure, key="--svg")
    if csv is not None:
        write_new(csv, cells, key="--csv")
    if json:
        print_json("schedule show", shown.to_json())
    else:
        print("\n".join(shown.lines(shutil.get_terminal_size((100, 24)).columns)))
    for written in (svg, csv):
        if written is not None:
            note(f"written: {written}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A schedule with all that is said of it."""

    schedule: Schedule
    report: ScheduleReport
    simulation: Simulation
    times: Times
    lower_bound: float | None

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
        makespan = f"{simulation.makespan_s:g} slots, {busy:g} of them busy"
        if self.lower_bound is not None:
            makespan += f"; none takes less than {self.lower_bound:g}"
        for name, text in (
            ("makespan", makespan),
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
            "lower_bound": self.lower_bound,
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
        """Return a width in which a slot is a whole number of columns, if there is room for it.

        A slot is 1, or the shortest time of an action where that is less.
        """
        margin = len(f"rank {self.schedule.num_ranks - 1}") + 2
        slots = self.simulation.makespan_s / min(1.0, self.times.shortest())
        wide = min(floor((columns - margin) / slots), _WIDEST_SLOT)
        return columns if wide < 1 else margin + floor(wide * slots)


def _numbers(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
