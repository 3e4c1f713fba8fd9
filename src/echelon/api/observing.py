"""What a run did, from its folder: its timelines, written beside it and given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echelon.config.job import Job
from echelon.config.times_file import times_of
from echelon.core.errors import EchelonError
from echelon.observe.run_directory import open_run
from echelon.observe.schedule_report import (
    ScheduleReport,
    read_schedule_report,
    require_pipeline,
    write_planned_trace,
    write_traces,
)


def observe_schedule(
    run: str | Path, *, step: int | None = None, say: Callable[[str], None] = lambda _: None
) -> ScheduleReport:
    """Return the schedule of a run as planned and as measured in `step`, the last one by default.

    Both traces are written into the folder of the run. `say` is told where that cannot be, and
    where a newer step than the one that is shown was not recorded whole, as a kill leaves it.
    ConfigError where there is no such run, no pipeline in it, or no events of that step.
    """
    path = Path(run)
    require_pipeline(open_run(path).plan(), path)
    report = read_schedule_report(path, step=step)
    if step is None and report.step != report.newest:
        say(f"step {report.newest} was not recorded whole: this is step {report.step}")
    try:
        write_traces(report)
    except EchelonError as error:
        # A run of somebody else may be looked at, and not written to.
        say(f"no traces written: {error.problems[0].message}")
    return report


def trace_plan(job: Job, run: Path) -> None:
    """Write the planned trace of a run that starts, unless it records no events."""
    if job.observe.events:
        write_planned_trace(run, job.plan, times_of(job))


def trace_run(job: Job, run: Path, *, say: Callable[[str], None] = lambda _: None) -> None:
    """Write both traces of a run that has ended; what keeps it from that is said, not raised.

    Under torchrun, ranks of other hosts may have left their events elsewhere.
    """
    if not job.observe.events:
        return
    try:
        write_traces(read_schedule_report(run))
    except EchelonError as error:
        say(f"no measured trace: {error.problems[0].message}")
