# SPDX-License-Identifier: Apache-2.0
"""What a run does of its trackers: check that they are there, start their guard, tell how it went.

The process that trains does nothing more: no thread, no call, no import of a tracker's package.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from echelon.config.job import Job
from echelon.core.choices.trackers import TRACKERS
from echelon.core.disk import disk_errors
from echelon.core.errors import ConfigError, EnvironmentProblem
from echelon.core.optional import missing_package
from echelon.core.rulebook.run import MIRROR_WORKS, RUN_HAS_METRICS
from echelon.telemetry.events import METRICS_FILE
from echelon.telemetry.trackers.guard import (
    Companion,
    kill_session,
    tracker_environment,
    worker_command,
)
from echelon.telemetry.trackers.progress import (
    count_lines,
    log_path,
    mirror_status,
    mirrored_alone,
    read_progress,
)
from echelon.telemetry.trackers.tracker import config_of, tracker_folder
from echelon.telemetry.trackers.worker import FAILED

GUARD = "echelon.telemetry.trackers.guard"


def require_trackers(names: Iterable[str], *, set_by: str = "") -> None:
    """Raise EnvironmentProblem where the package of a tracker is not installed."""
    problems = [
        problem
        for one in (TRACKERS[name] for name in names)
        if (
            problem := missing_package(
                one.package,
                extra=one.name,
                purpose=f"mirroring a run in {one.title}",
                set_by=set_by,
            )
        )
    ]
    if problems:
        raise EnvironmentProblem(problems)


@contextmanager
def mirrored_run(job: Job, run: Path, say: Callable[[str], None]) -> Generator[None]:
    """Mirror `run` for as long as the block runs, and a bounded time after; tell what is missing.

    Nothing that goes wrong with a tracker is raised.
    """
    trackers, drain_s = job.observe.trackers, job.observe.tracker_drain_s
    if not trackers:
        yield
        return
    arguments = [str(run.absolute()), job.observe.tracker_project, repr(drain_s), *trackers]
    try:
        guard = Companion(GUARD, arguments, log_path(run, "guard"))
    except OSError as error:
        say(f"no trackers: their process cannot be started: {error}")
        yield
        return
    try:
        yield
    finally:
        if not guard.end(drain_s):
            for line in unmirrored(run, trackers):
                say(line)


def mirror_now(run: Path, tracker: str) -> None:
    """Mirror what is missing of a run, and wait for it; EnvironmentProblem where it fails."""
    with mirrored_alone(run, tracker):
        progress = read_progress(run, tracker)
    settings = config_of(run)
    project = str(settings.get("observe.tracker_project", "echelon"))
    if progress is None and count_lines(run) == 0:
        raise ConfigError(RUN_HAS_METRICS.problem(f"{run} has no line in {METRICS_FILE} yet"))
    folder, log = tracker_folder(run, tracker), log_path(run, tracker)
    with disk_errors(f"to write into {run}"):
        folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(exist_ok=True)
        begin = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            process = subprocess.Popen(
                worker_command(run.absolute(), tracker, project),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=tracker_environment(TRACKERS[tracker], folder),
                start_new_session=True,
            )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        kill_session(process)
        raise
    if code != 0:
        with log.open("rb") as file:
            file.seek(begin)
            printed = file.read().decode(errors="replace").splitlines()
        said = [one.removeprefix(FAILED) for one in printed if one.startswith(FAILED)]
        raise EnvironmentProblem(
            MIRROR_WORKS.problem(
                f"{tracker} did not take the run: {said[-1] if said else f'it ended with {code}'}",
                suggestions=(f"look into {log}",),
            )
        )


def unmirrored(run: Path, trackers: Iterable[str]) -> list[str]:
    """Return what to say of each tracker that lacks something of a run."""
    found = {one.tracker: one for one in mirror_status(run)}
    lines: list[str] = []
    for name in trackers:
        status = found.get(name)
        if status is None or not status.complete:
            stands = f"{name} has nothing of the run" if status is None else status.says()
            lines.append(
                f"{stands}; {log_path(run, name)} says why; the rest: "
                f"echelon observe {run} --mirror {name}"
            )
    return lines
