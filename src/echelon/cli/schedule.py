"""`echelon schedule check`: prove a schedule that somebody wrote, or draw where it is stuck."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from echelon.cli.flags import Json
from echelon.cli.output import print_error, print_json, table
from echelon.cli.schedule_choice import MostInFlight, checked, limits_of

if TYPE_CHECKING:
    from echelon.core.errors import InfeasiblePlan
    from echelon.schedule.check import ScheduleReport
    from echelon.schedule.files import ScheduleFile

NOT_PROVEN = 1


def check(
    file: Annotated[Path, Parameter(help="A schedule as CSV (a row per rank) or JSON.")],
    /,
    *,
    most_in_flight: MostInFlight = None,
    json: Json = False,
) -> int:
    """Prove that a schedule is whole, in order and within memory, and cannot deadlock.

    Exit 1 where it is not: the cells are named, and the shortest circle of waits is drawn.
    """
    from echelon.core.errors import InfeasiblePlan
    from echelon.schedule.files import read_schedule_file

    found: ScheduleFile | None = None
    try:
        found = read_schedule_file(file)
        limits = limits_of(most_in_flight, found.schedule.num_ranks)
        report = checked(found.schedule, limits, found.cells)
    except InfeasiblePlan as error:
        _print_refused(file, found, error, json=json)
        return NOT_PROVEN
    if json:
        print_json("schedule check", {"proven": True, "file": str(file), **_facts(found, report)})
    else:
        print(f"{file}: proven\n\n" + "\n".join(_proven(found, report, limits)))
    return 0


def _print_refused(
    file: Path, found: ScheduleFile | None, error: InfeasiblePlan, *, json: bool
) -> None:
    """Say what is wrong, and draw the circle in which ranks wait, if that is it."""
    from echelon.core.rulebook.schedule import SCHEDULE_CANNOT_DEADLOCK, SCHEDULE_KEEPS_ORDER
    from echelon.schedule.deadlock import stuck_cycle
    from echelon.schedule.stuck import draw_stuck

    stuck = {SCHEDULE_CANNOT_DEADLOCK.id, SCHEDULE_KEEPS_ORDER.id} & set(error.rules)
    circle = stuck_cycle(found.schedule) if found is not None and stuck else ()
    if json:
        waits = [
            {
                "rank": wait.rank,
                "action": str(wait.action),
                "waits_for": str(wait.waits_for),
                "on_rank": wait.on_rank,
            }
            for wait in circle
        ]
        problems = [problem.to_json() for problem in error.problems]
        result = {"proven": False, "file": str(file), "problems": problems, "stuck": waits}
        print_json("schedule check", result)
        return
    print(f"{file}: NOT PROVEN")
    if found is not None and circle:
        print("\n" + draw_stuck(found.schedule, circle, found.cells))
    print_error(error)


def _facts(found: ScheduleFile, report: ScheduleReport) -> dict[str, object]:
    schedule = found.schedule
    return {
        "name": report.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "stage_ranks": list(schedule.stage_ranks),
        "mirrored": list(schedule.mirrored),
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
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    use = "used as they come" if report.consumes_in_order else "some are kept until they are used"
    queue = "may share a queue" if report.shares_queue else "need a queue each"
    window = report.send_window
    claims = [
        ("complete", f"{report.num_actions} actions: {microbatches} microbatches cross {stages} "),
        ("in order", "what an action needs of its own rank stands before it"),
        ("no deadlock", f"{report.num_messages} messages, {use}; no circle of waits"),
        ("transport", f"sends pending on a channel: {window}; its two directions {queue}"),
        ("memory", "within the limits" if limits else "no limit was set: --most-in-flight N"),
    ]
    claims[0] = ("complete", claims[0][1] + "stages forward and backward, once each")
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
