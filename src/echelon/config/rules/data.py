"""What must hold of the data of a run before it trains: a run names what it reads."""

from __future__ import annotations

from echelon.config.entries import DEFAULT
from echelon.config.job import DataSettings, Job, ResolvedSetting
from echelon.config.settings.value_types import toml_text
from echelon.core.errors import Problem
from echelon.core.rulebook.data import DATA_IS_NAMED

KEY = "data.source"
WAYS = (
    f'{KEY} = "stdlib" (the source of Python, to try a run out)',
    f'{KEY} = "PATH" or a URL (text; jsonl; parquet; a folder of these)',
    f'{KEY} = "FOLDER" (written by echelon data prepare)',
)
"""How a run names its data."""


def unnamed_data() -> tuple[ResolvedSetting, ...]:
    """Return the sources of a job that nobody gave data."""
    return (ResolvedSetting(key=KEY, value=toml_text(DataSettings().source), source=DEFAULT),)


def data_is_named(job: Job) -> bool:
    """Return whether a file, a preset, a flag or a caller says what `job` reads."""
    return bool(job.data.mixture) or job.source_of(KEY) != DEFAULT


def data_problems(job: Job) -> list[Problem]:
    """Return the problem of a job that is to train on data that nothing names."""
    if data_is_named(job):
        return []
    message = f"{KEY} is not set: nothing says what {job.plan.name} reads"
    return [DATA_IS_NAMED.problem(message, key=KEY, suggestions=WAYS)]
