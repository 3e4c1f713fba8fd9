# SPDX-License-Identifier: Apache-2.0
"""What a tracker can do for a mirror, and what it is told of a run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from echelon.core.choices.trackers import TRACKERS_FOLDER
from echelon.core.parameters import num_parameters
from echelon.core.version import __version__
from echelon.telemetry.run_directory import open_run
from echelon.telemetry.trackers.points import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Say which run a tracker is to hold, and under what name."""

    folder: Path
    """Where its files go, unless the user's environment says where."""
    project: str
    """What keeps runs together: a project, an experiment."""
    group: str
    """The name of our run."""
    revision: int
    """1, and one more each time that steps were taken again and the tracker cannot forget them."""
    id: str
    """What the tracker calls the run, as it said the last time; empty: it has none yet."""
    config: Mapping[str, object]
    """The settings of the run, and what follows from them."""

    @property
    def name(self) -> str:
        """Return the name of the run in the tracker."""
        return self.group if self.revision == 1 else f"{self.group}-{self.revision}"


class Tracker(Protocol):
    """Write the points of one run into a tracker; what fails raises, and is tried again later."""

    rewinds: bool
    """Whether it can forget what follows a step."""

    def open(self, run: TrackedRun) -> str:
        """Begin a run, or go on with it where it has an id; return the id."""
        ...

    def recorded(self) -> int | None:
        """Return the largest line number that it has; None where it cannot say."""
        ...

    def rewind(self, step: int) -> None:
        """Forget this step and what follows it."""
        ...

    def write(self, points: Sequence[Point]) -> None:
        """Write points; once this returns they are the tracker's."""
        ...

    def close(self) -> None:
        """Let go of the run; it may be opened again."""
        ...


def tracker_folder(run: Path, tracker: str) -> Path:
    """Return where a tracker has its files in a run."""
    return run / TRACKERS_FOLDER / tracker


def config_of(run: Path) -> dict[str, object]:
    """Return what trackers are told of a run: its settings, and what follows from its plan.

    No variable of the environment and nothing of the command line is among it.
    """
    directory = open_run(run)
    plan = directory.plan()
    with directory.run_file.open("rb") as file:
        settings = dict(_flat(tomllib.load(file), ""))
    return {
        **settings,
        "plan_hash": plan.content_hash(),
        "parameters": num_parameters(plan.model),
        "world_size": plan.mesh.world_size,
        "microbatches": plan.num_microbatches,
        "tokens_per_step": plan.tokens_per_step,
        "cluster": plan.cluster.name,
        "echelon": __version__,
    }


def _flat(table: Mapping[str, object], prefix: str) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found
