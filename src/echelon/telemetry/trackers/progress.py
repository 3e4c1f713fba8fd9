# SPDX-License-Identifier: Apache-2.0
"""How far each mirror of a run got, and who writes it: trackers/TOOL.json in the run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from echelon.core.choices.trackers import TRACKERS, TRACKERS_FOLDER
from echelon.core.disk import disk_errors
from echelon.core.errors import ConfigError, EnvironmentProblem
from echelon.core.rulebook.run import EVENTS_READABLE, MIRROR_NOT_IN_USE
from echelon.core.serialize import decode_json, from_json, to_json
from echelon.telemetry.events import METRICS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorProgress:
    """Say how far a mirror got."""

    project: str
    """The project or experiment that holds it."""
    id: str = ""
    """What the tracker calls the run; empty before it was opened."""
    revision: int = 1
    """How many runs of the tracker this one took: see `TrackedRun.revision`."""
    lines: int = 0
    """The last line of metrics.jsonl that is in the tracker."""
    replayed: int = 0
    """Where the history ended that this run of the tracker began with."""
    schema: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """Say how a mirror stands beside the metrics of its run."""

    tracker: str
    lines: int
    total_lines: int

    @property
    def complete(self) -> bool:
        """Return whether the tracker has all that the run wrote."""
        return self.lines >= self.total_lines

    def says(self) -> str:
        """Return how it stands, in words."""
        if self.complete:
            return f"{self.tracker}: all {self.total_lines} lines"
        return f"{self.tracker}: {self.lines} of {self.total_lines} lines"


def progress_path(run: Path, tracker: str) -> Path:
    """Return where a mirror notes how far it got."""
    return run / TRACKERS_FOLDER / f"{tracker}.json"


def log_path(run: Path, tracker: str) -> Path:
    """Return where what a tracker prints is kept."""
    return run / "logs" / f"tracker-{tracker}.log"


def read_progress(run: Path, tracker: str) -> MirrorProgress | None:
    """Return how far a mirror got; None where there is none yet. ConfigError: it was damaged."""
    path = progress_path(run, tracker)
    try:
        return from_json(MirrorProgress, decode_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            EVENTS_READABLE.problem(
                f"{path} cannot be read: {error}",
                suggestions=(
                    f"remove {path}: the run is mirrored again, as a new run of the tool",
                ),
            )
        ) from error


def write_progress(run: Path, tracker: str, progress: MirrorProgress) -> None:
    """Note how far a mirror got."""
    path = progress_path(run, tracker)
    with disk_errors(f"to write {path}"):
        path.parent.mkdir(exist_ok=True)
        # Whole or not at all; what a power cut loses the tracker itself can say.
        new = path.with_name(f".{path.name}")
        new.write_text(json.dumps(to_json(progress)) + "\n", encoding="utf-8")
        new.replace(path)


def mirror_status(run: Path) -> tuple[MirrorStatus, ...]:
    """Return how the mirrors of a run stand, those that were begun."""
    found = {one: read_progress(run, one) for one in TRACKERS}
    if not any(found.values()):
        return ()
    total = count_lines(run)
    return tuple(
        MirrorStatus(tracker=one, lines=progress.lines, total_lines=total)
        for one, progress in found.items()
        if progress is not None
    )


def count_lines(run: Path) -> int:
    """Return how many whole lines the metrics of a run have."""
    total = 0
    try:
        with (run / METRICS_FILE).open("rb") as file:
            while part := file.read(1 << 20):
                total += part.count(b"\n")
    except OSError:
        return 0
    return total


@contextmanager
def mirrored_alone(run: Path, tracker: str) -> Generator[None]:
    """Hold a mirror for this process; EnvironmentProblem where another one writes it."""
    path = run / TRACKERS_FOLDER / f".{tracker}.lock"
    with disk_errors(f"to write into {path.parent}"):
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentProblem(
                MIRROR_NOT_IN_USE.problem(f"another process mirrors {run} in {tracker}")
            ) from None
        except OSError:
            pass  # A file system without locks: whoever starts two mirrors has been told.
        yield
    finally:
        os.close(descriptor)
