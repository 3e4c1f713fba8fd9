# SPDX-License-Identifier: Apache-2.0
"""Settings of the pipeline: their keys, and the numbers that follow from them.

A schedule is a name that a builder answers to, or "file" (the actions of each rank stand in a file)
or "auto" (a search finds them). `config/rules/pipeline.py` says what must hold between them,
`config/automatic.py` makes the stages and the rows of a plan.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config.view import Unavailable, View, data_ranks
from echelon.core.errors import EchelonError
from echelon.schedule.build import SCHEDULES

if TYPE_CHECKING:
    from echelon.schedule.files import ScheduleFile

FILE, AUTO, EVEN, NONE = "file", "auto", "even", "none"
MOST_VIRTUAL = 8  # stages of a rank

FILE_KEY, SCHEDULE_KEY = "pipeline.file", "pipeline.schedule"
VIRTUAL_KEY, STAGES_KEY = "pipeline.virtual_stages", "pipeline.stages"
TIMES_KEY, LIMIT_KEY = "pipeline.times", "pipeline.most_in_flight"
BATCH_KEYS = (
    "batch.global_sequences",
    "batch.microbatch_sequences",
    "mesh.dp_replicate",
    "mesh.dp_shard",
)


def stages_per_rank(view: View) -> int:
    """Return how many stages there are for each pipeline rank, derived where nobody says.

    A file says it, and so does a schedule that takes one number only (zb-v: 2).
    """
    name, pp = view.word(SCHEDULE_KEY), view.integer("mesh.pp")
    if name == FILE and not view.is_resolved:
        return stages_of_file(view)
    if name in SCHEDULES and view.is_default(VIRTUAL_KEY) and VIRTUAL_KEY not in view.entries:
        fitting = virtual_that_fit(name, pp)
        if len(fitting) == 1:
            return fitting[0]
    return view.integer(VIRTUAL_KEY)


def stages_of_file(view: View) -> int:
    """Return how many stages of each rank a file has; Unavailable where it has other ranks."""
    schedule, pp = schedule_file(view).schedule, view.integer("mesh.pp")
    if schedule.num_ranks != pp or schedule.num_stages % pp:
        raise Unavailable(FILE_KEY)
    return schedule.num_stages // pp


def num_stages(view: View) -> int:
    """Return how many stages a model is cut into: with dualpipe each is on two ranks."""
    return view.integer("mesh.pp") * stages_per_rank(view)


def num_microbatches(view: View) -> int:
    """Return the microbatches of a data rank in a step; Unavailable where they do not come out."""
    size, dp = view.integer("batch.microbatch_sequences"), data_ranks(view)
    count, rest = divmod(view.integer("batch.global_sequences"), size * dp)
    if rest:
        raise Unavailable("batch.global_sequences")
    return count


def schedule_file(view: View) -> ScheduleFile:
    """Return the schedule that `pipeline.file` holds; Unavailable where it cannot be read."""
    path = view.path(FILE_KEY)
    if view.entry(FILE_KEY).value == NONE:
        raise Unavailable(FILE_KEY)
    try:
        return read_once(path)
    except EchelonError as error:
        raise Unavailable(FILE_KEY) from error


def in_flight_limits(view: View) -> tuple[int, ...] | None:
    """Return how many (stage, microbatch) pairs each rank may hold, or None for "auto"."""
    most = view.entry(LIMIT_KEY).value
    return (most,) * view.integer("mesh.pp") if isinstance(most, int) else None


def read_once(path: Path) -> ScheduleFile:
    """Read a file once while it does not change: every rule about stages asks for it."""
    from echelon.schedule.files import read_schedule_file

    try:
        stat = path.stat()
    except (OSError, ValueError):
        return read_schedule_file(path)
    return _read_at(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _read_at(path: Path, _time: int, _size: int) -> ScheduleFile:
    from echelon.schedule.files import read_schedule_file

    return read_schedule_file(path)


def virtual_that_fit(name: str, pp: int) -> tuple[int, ...]:
    """Return the stages of a rank with which a schedule can be built."""
    fits = SCHEDULES[name].fits_stages
    return tuple(n for n in range(1, MOST_VIRTUAL + 1) if fits(n * pp, pp))
