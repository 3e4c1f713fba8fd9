# SPDX-License-Identifier: Apache-2.0
"""`ec.observe`: what a run did, from its folder; its schedule, and where its tokens went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echelon.config.files.measurements import unit_times_from_job
from echelon.config.job import Job
from echelon.core.errors import EchelonError
from echelon.telemetry.routing import ExpertHotspots, read_hotspots
from echelon.telemetry.run_directory import open_run
from echelon.telemetry.schedule_report import (
    TimelineReport,
    read_schedule_report,
    require_pipeline,
    write_planned_trace,
    write_traces,
)
from echelon.telemetry.summary import RunSummary, summarize_run
from echelon.telemetry.trackers.progress import MirrorStatus, mirror_status
from echelon.telemetry.trackers.start import mirror_now, require_trackers


def observe(run: str | Path) -> RunSummary:
    """Return the summary of a run so far: steps, losses, seconds, memory, checkpoints.

    ConfigError where there is no such run.
    """
    return summarize_run(Path(run))


def observe_experts(run: str | Path, *, step: int | None = None) -> ExpertHotspots:
    """Return the tokens of each expert in `step`, by default the last recorded one.

    ConfigError where there is no such run, it has no experts, or nothing of that step is written.
    """
    return read_hotspots(Path(run), step=step)


def observe_schedule(
    run: str | Path, *, step: int | None = None, say: Callable[[str], None] = lambda _: None
) -> TimelineReport:
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


def mirror_run(run: str | Path, tracker: str) -> MirrorStatus:
    """Mirror in a tracker what it lacks of a run, in a process of its own; return how it stands.

    The run may have ended long ago, and what is mirrored already is not written again. ConfigError
    where there is no such run, EnvironmentProblem where the tracker's package is not there or
    fails, or another process mirrors the run.
    """
    path = open_run(Path(run)).path
    require_trackers([tracker])
    mirror_now(path, tracker)
    return next(one for one in mirror_status(path) if one.tracker == tracker)


def trace_plan(job: Job, run: Path) -> None:
    """Write the planned trace of a run that starts, unless it records no events."""
    if job.observe.events:
        write_planned_trace(run, job.plan, unit_times_from_job(job))


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
