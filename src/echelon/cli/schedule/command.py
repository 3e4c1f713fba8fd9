# SPDX-License-Identifier: Apache-2.0
"""`echelon schedule`: draw a schedule with what it costs; prove one, or draw where it is stuck."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import floor
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.flags import CELLS, DRAWING, OUT, Json, Names, WrittenFiles
from echelon.cli.output import note, print_error, print_json
from echelon.cli.schedule.arguments import (
    MostInFlight,
    ScheduleArguments,
    SlotTimes,
    checked_schedule,
    choose_schedule,
    limits_of,
)
from echelon.config.files.new_file import write_new
from echelon.core.errors import InfeasiblePlan
from echelon.core.rulebook.pipeline import SCHEDULE_CANNOT_DEADLOCK, SCHEDULE_KEEPS_ORDER
from echelon.planner.report.pipeline import schedule_identities, simulation_identities
from echelon.planner.report.printed_numbers import require_identities
from echelon.planner.view.text_layout import table
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES
from echelon.schedule.check import ScheduleReport
from echelon.schedule.deadlock import draw_deadlock, find_deadlock
from echelon.schedule.draw import KEY, draw_timeline, timeline_svg
from echelon.schedule.files import ScheduleFile, read_schedule_file, schedule_csv
from echelon.schedule.simulate import Simulation, simulate

NOT_PROVEN = 1  # exit code


def check(
    file: Annotated[Path, Parameter(help="A schedule as CSV (a row per rank) or JSON.")],
    /,
    *,
    most_in_flight: MostInFlight = None,
    json: Json = False,
) -> int:
    """Prove that a schedule is whole, in order and within memory, and cannot deadlock.

    Exit 1 where it is not: the cells are named, and the shortest cycle of waiting ranks is drawn.
    """
    found: ScheduleFile | None = None
    try:
        found = read_schedule_file(file)
        limits = limits_of(most_in_flight, found.schedule.num_ranks)
        report = checked_schedule(found.schedule, limits, found.cells)
    except InfeasiblePlan as error:
        _print_refused(file, found, error, json=json)
        return NOT_PROVEN
    require_identities(schedule_identities("", found.schedule, asdict(report)))
    if json:
        print_json(
            "schedule check", {"proven": True, "file": str(file), **_facts(found.schedule, report)}
        )
    else:
        print(f"{file}: proven\n\n" + "\n".join(_proven(found, report, limits)))
    return 0


def _print_refused(
    file: Path, found: ScheduleFile | None, error: InfeasiblePlan, *, json: bool
) -> None:
    """Say what is wrong, and draw the cycle in which ranks wait, if that is it."""
    stuck = {SCHEDULE_CANNOT_DEADLOCK.id, SCHEDULE_KEEPS_ORDER.id} & set(error.rules)
    circle = find_deadlock(found.schedule) if found is not None and stuck else ()
    if json:
        waits = [
            {
                "rank": wait.rank,
                "action": str(wait.action),
                "waits_for": str(wait.awaited_action),
                "on_rank": wait.awaited_rank,
            }
            for wait in circle
        ]
        problems = [problem.to_json() for problem in error.problems]
        result = {"proven": False, "file": str(file), "problems": problems, "stuck": waits}
        print_json("schedule check", result)
        return
    print(f"{file}: NOT PROVEN")
    if found is not None and circle:
        print("\n" + draw_deadlock(found.schedule, circle, found.cells))
    print_error(error)


def _shape_json(schedule: Schedule) -> dict[str, object]:
    return {
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "stage_ranks": list(schedule.stage_ranks),
        "mirrored": list(schedule.mirrored),
    }


def _facts(schedule: Schedule, report: ScheduleReport) -> dict[str, object]:
    return _shape_json(schedule) | {
        "num_actions": report.num_actions,
        "num_messages": report.num_messages,
        "peak_in_flight_per_rank": list(report.peak_in_flight_per_rank),
        "peak_in_flight_per_stage": list(report.peak_in_flight_per_stage),
        "send_window": report.send_window,
        "shares_queue": report.shares_queue,
        "consumes_in_order": report.consumes_in_order,
    }


def _proven(
    found: ScheduleFile, report: ScheduleReport, limits: tuple[int, ...] | None
) -> Iterator[str]:
    """Yield what was proved, claim by claim, and what each rank holds."""
    schedule = found.schedule
    use = "used as they come" if report.consumes_in_order else "some are kept until they are used"
    queue = "may share a queue" if report.shares_queue else "need a queue each"
    window = report.send_window
    crossed = f"{schedule.num_microbatches} microbatches cross {schedule.num_stages} stages"
    claims = [
        ("complete", f"{report.num_actions} actions: {crossed} forward and backward, once each"),
        ("in order", "what an action needs of its own rank stands before it"),
        ("no deadlock", f"{report.num_messages} messages, {use}; no cycle of waiting ranks"),
        ("transport", f"sends pending on a channel: {window}; its two directions {queue}"),
        ("memory", "within the limits" if limits else "no limit was set: --most-in-flight N"),
    ]
    if schedule.mirrored:
        mirrored = ", ".join(map(str, schedule.mirrored))
        claims.insert(1, ("mirrored", f"on copies of the stages: microbatches {mirrored}"))
    yield from (f"{name:<12}  {text}" for name, text in claims)
    yield ""
    rows = [
        (
            rank,
            " ".join(str(stage) for stage in schedule.stages_of(rank)),
            peak,
            " ".join(str(report.peak_in_flight_per_stage[s]) for s in schedule.stages_of(rank)),
            limits[rank] if limits else "-",
        )
        for rank, peak in enumerate(report.peak_in_flight_per_rank)
    ]
    yield table(("rank", "stages", "holds at most", "of each stage", "limit"), rows)


_WIDEST_SLOT = 6  # columns of text


def show(
    schedule: Annotated[
        str, Parameter(help="A schedule such as 1f1b, auto to search one, or a file.")
    ],
    /,
    *,
    pp: Annotated[int | None, Parameter(name=("--pp", "-p"), help="Pipeline ranks.")] = None,
    microbatches: Annotated[
        int | None, Parameter(name=("--microbatches", "-m"), help="Microbatches of a step.")
    ] = None,
    virtual_stages: Annotated[
        int | None, Parameter(name="--virtual-stages", help="Stages per rank.")
    ] = None,
    slots: Annotated[
        str,
        Parameter(help="The slots that F, B, W and a transfer take: F,B,W,transfer. BW is B + W."),
    ] = "1,1,1,0",
    most_in_flight: MostInFlight = None,
    out: Annotated[
        Names,
        Parameter(
            show_default=False,
            help="What to write, by its ending: the drawing as FILE.svg, the cells as FILE.csv, "
            "which a run reads; repeat for both.",
        ),
    ] = (),
    json: Json = False,
) -> int:
    """Draw a schedule with its bubble, what its ranks hold, and what they send."""
    wanted = ScheduleArguments(
        text=schedule,
        pp=pp,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        most_in_flight=most_in_flight,
        times=SlotTimes.parse(slots),
    )
    files = WrittenFiles.read(out, (DRAWING, CELLS))
    svg, csv = files.get(DRAWING), files.get(CELLS)
    chosen = choose_schedule(wanted)
    found = chosen.schedule
    shown = _DrawnSchedule(
        schedule=found,
        report=checked_schedule(found, chosen.limits, chosen.cells),
        simulation=simulate(found, wanted.times.durations(found.num_stages)),
        times=wanted.times,
        lower_bound=chosen.lower_bound,
    )
    require_identities(
        (
            *schedule_identities("", found, asdict(shown.report)),
            *simulation_identities(
                "", found, wanted.times.durations(found.num_stages), shown.simulation
            ),
        )
    )
    # Both texts are made before either is written: what goes wrong leaves no file behind.
    figure = timeline_svg(shown.simulation.events, title=shown.title(), unit="slots") if svg else ""
    cells = schedule_csv(found) if csv else ""
    if svg is not None:
        write_new(svg, figure, key=OUT)
    if csv is not None:
        write_new(csv, cells, key=OUT)
    if json:
        print_json("schedule show", shown.to_json())
    else:
        print("\n".join(shown.lines(shutil.get_terminal_size((100, 24)).columns)))
    for written in (svg, csv):
        if written is not None:
            note(f"written: {written}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnSchedule:
    """A schedule with all that is said of it."""

    schedule: Schedule
    report: ScheduleReport
    simulation: Simulation
    times: SlotTimes
    lower_bound: float | None

    def title(self) -> str:
        """Return the line over the figure."""
        bubble = f"bubble {100 * self.simulation.bubble_fraction:.1f} %"
        return f"{self._what()}; {bubble}, makespan {self.simulation.makespan_s:g} slots"

    def lines(self, columns: int) -> Iterator[str]:
        """Yield the drawing and the facts."""
        report, simulation = self.report, self.simulation
        yield f"{self._what()}; {self.times}"
        if self.schedule.name in SCHEDULES:
            yield SCHEDULES[self.schedule.name].paper
        yield ""
        yield draw_timeline(simulation.events, self._width(columns), unit="slots") + KEY + "\n"
        busy = sum(simulation.busy_s) / len(simulation.busy_s)
        fraction, overhead = simulation.bubble_fraction, simulation.bubble_overhead
        makespan = f"{simulation.makespan_s:g} slots, {busy:g} of them busy"
        held = ", ".join(map(str, report.peak_in_flight_per_rank))
        if self.lower_bound is not None:
            makespan += f"; none takes less than {self.lower_bound:g}"
        for name, text in (
            ("makespan", makespan),
            ("bubble", f"{100 * fraction:.2f} % of the step, {100 * overhead:.2f} % of the work"),
            ("in flight", f"{held} at most on each rank"),
            ("messages", f"{report.num_messages}, {report.send_window} pending on a channel"),
        ):
            yield f"{name:<11}{text}"

    def to_json(self) -> dict[str, object]:
        """Return the facts, and the rows of all ranks."""
        schedule, report, simulation = self.schedule, self.report, self.simulation
        return {
            **_shape_json(schedule),
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
