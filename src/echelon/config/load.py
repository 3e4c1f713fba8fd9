"""A run file or preset, and --set flags -> a Job, or an error that tells everything at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from echelon.config.gather import gather
from echelon.config.job import Job
from echelon.config.resolve import resolve


def load_job(source: Path | str, sets: Sequence[str] = (), *, world_size: int | None = None) -> Job:
    """Return the Job of a run file (or of the preset of this name) with `sets` on top.

    `sets` are "table.key=value" strings. `world_size` is the number of ranks that a launcher has
    started, where one has. Raises ConfigError, with all problems that there are; InfeasiblePlan
    where only the combination is at fault.
    """
    return resolve(gather(source, sets), run_name_of(source), world_size)


def run_name_of(source: Path | str) -> str:
    """Return the name of a run that does not say its own: that of its file or preset."""
    stem = Path(source).name.removesuffix(".toml")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-") or "run"
