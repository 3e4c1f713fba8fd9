"""Settings of the pipeline: how many stages there are, and what must hold of them.

A schedule is a name that a builder answers to, or "file" (the actions of each rank stand in a file)
or "auto" (a search finds them). `config/placement.py` makes the stages and the rows of a plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from echelon.config.kinds import toml_text
from echelon.config.view import Unavailable, View, data_ranks
from echelon.core.errors import EchelonError, Problem
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.core.rulebook.pipeline import SCHEDULE_FILE_FITS_RUN
from echelon.core.rulebook.schedule import SCHEDULE_KNOWN, SCHEDULE_STAGES_PER_RANK
from echelon.core.rules import nearest_divisors
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.check import check_schedule
from echelon.schedule.files import ScheduleFile, read_schedule_file
from echelon.schedule.plan_problems import tied_problems

FILE, AUTO, EVEN, NONE = "file", "auto", "even", "none"
MOST_VIRTUAL = 8

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
    if name == FILE:
        schedule = schedule_file(view).schedule
        if schedule.num_ranks != pp or schedule.num_stages % pp:
            raise Unavailable(FILE_KEY)
        return schedule.num_stages // pp
    if name in SCHEDULES and view.is_default(VIRTUAL_KEY) and VIRTUAL_KEY not in view.entries:
        fitting = _virtual_that_fit(name, pp)
        if len(fitting) == 1:
            return fitting[0]
    return view.integer(VIRTUAL_KEY)


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
        return _read(path)
    except EchelonError as error:
        raise Unavailable(FILE_KEY) from error


def in_flight_limits(view: View) -> tuple[int, ...] | None:
    """Return how many (stage, microbatch) pairs each rank may hold, or None for "auto"."""
    most = view.entry(LIMIT_KEY).value
    return (most,) * view.integer("mesh.pp") if isinstance(most, int) else None


def _read(path: Path) -> ScheduleFile:
    """Read a file once while it does not change: every rule about stages asks for it."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return read_schedule_file(path)
    return _read_at(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _read_at(path: Path, _time: int, _size: int) -> ScheduleFile:
    return read_schedule_file(path)


def _virtual_that_fit(name: str, pp: int) -> tuple[int, ...]:
    fits = SCHEDULES[name].fits_stages
    return tuple(n for n in range(1, MOST_VIRTUAL + 1) if fits(n * pp, pp))


def schedule_fits(view: View) -> Iterator[Problem]:
    """Check that the schedule exists and has the stages and microbatches that it needs."""
    name = view.word(SCHEDULE_KEY)
    if name in (FILE, AUTO):
        return
    if name not in SCHEDULES:
        # The other numbers do not matter: it reports the name alone.
        for problem in schedule_problems(name, num_stages=1, num_ranks=1, num_microbatches=1):
            works = (*problem.works, FILE, AUTO)
            yield replace(problem, set_by=view.set_by(SCHEDULE_KEY), works=works)
        return
    pp = view.integer("mesh.pp")
    for problem in schedule_problems(
        name, num_stages=num_stages(view), num_ranks=pp, num_microbatches=num_microbatches(view)
    ):
        assert problem.rule != SCHEDULE_KNOWN.id
        if problem.rule == SCHEDULE_STAGES_PER_RANK.id:
            keys, works = (VIRTUAL_KEY, "mesh.pp"), [*_placements_that_fit(view, name)]
        elif problem.key == "mesh.pp":
            keys, works = ("mesh.pp",), [*map(_as_setting, problem.works)]
        else:
            keys = ("mesh.pp", *BATCH_KEYS[:2])
            works = [*_batches_that_fit(view, name), *map(_as_setting, problem.works)]
        yield replace(problem, set_by=view.set_by(SCHEDULE_KEY, *keys), works=tuple(works))


def _as_setting(advice: str) -> str:
    """Return ``schedule = 'gpipe'`` as it can be pasted into a run file."""
    found = re.fullmatch(r"schedule = '(.+)'", advice)
    return f"{SCHEDULE_KEY} = {toml_text(found[1])}" if found else advice


def _placements_that_fit(view: View, name: str) -> Iterator[str]:
    """Yield what would let a schedule place its stages: their number, the ranks, another one."""
    pp, virtual = view.integer("mesh.pp"), stages_per_rank(view)
    near = sorted(_virtual_that_fit(name, pp), key=lambda n: (abs(n - virtual), n))[:2]
    yield from (f"{VIRTUAL_KEY} = {n}" for n in near)
    if not near:
        ranks = [n for n in range(max(1, pp - 2), pp + 3) if n != pp and _virtual_that_fit(name, n)]
        yield from (f"mesh.pp = {n}" for n in ranks)
    others = [other for other in SCHEDULES if virtual in _virtual_that_fit(other, pp)]
    yield from (f"{SCHEDULE_KEY} = {toml_text(other)}" for other in others)


def _batches_that_fit(view: View, name: str) -> Iterator[str]:
    """Yield the nearest batches with a number of microbatches that the schedule takes."""
    share, rest = divmod(view.integer("batch.global_sequences"), data_ranks(view))
    if rest:
        return
    now, stages, pp = view.integer("batch.microbatch_sequences"), num_stages(view), 1
    pp = view.integer("mesh.pp")

    def fits(count: int) -> bool:
        return not schedule_problems(name, num_stages=stages, num_ranks=pp, num_microbatches=count)

    sizes = [size for size in nearest_divisors(share, now, limit=share) if fits(share // size)]
    for size in sorted(sizes, key=lambda size: (abs(size - now), size))[:2]:
        yield f"batch.microbatch_sequences = {size}"
    count = share // now
    lower = next((n for n in range(count - 1, 0, -1) if fits(n)), None)
    higher = next((n for n in range(count + 1, count + 4 * stages + 1) if fits(n)), None)
    for n in (lower, higher):
        if n is not None:
            yield f"batch.global_sequences = {n * now * data_ranks(view)}"


def file_fits(view: View) -> Iterator[Problem]:
    """Check that a schedule in a file can be read, is whole, and has the numbers of the run."""
    if view.word(SCHEDULE_KEY) != FILE:
        return
    if view.entry(FILE_KEY).value == NONE:
        yield MISSING_SETTING.problem(
            f'{FILE_KEY} is not set, and {SCHEDULE_KEY} = "file" reads it',
            key=FILE_KEY,
            set_by=view.set_by(SCHEDULE_KEY),
            works=(f'{FILE_KEY} = "schedule.csv"', f'{SCHEDULE_KEY} = "1f1b"'),
        )
        return
    set_by = view.set_by(FILE_KEY)
    try:
        found = _read(view.path(FILE_KEY))
        limits = in_flight_limits(view)
        same_ranks = found.schedule.num_ranks == view.integer("mesh.pp")
        check_schedule(
            found.schedule, most_in_flight=limits if same_ranks else None, cells=found.cells
        )
    except EchelonError as error:
        yield from (
            replace(problem, key=FILE_KEY, set_by=problem.set_by or set_by)
            for problem in error.problems
        )
        return
    yield from _numbers_of_file(view, found)
    if view.flag("model.tied"):
        set_by = view.set_by(FILE_KEY, "model.tied")
        yield from tied_problems(found.schedule, key=FILE_KEY, set_by=set_by)


def _numbers_of_file(view: View, found: ScheduleFile) -> Iterator[Problem]:
    schedule, pp = found.schedule, view.integer("mesh.pp")
    name = found.cells.source

    def misfit(message: str, keys: Sequence[str], works: Sequence[str]) -> Problem:
        return SCHEDULE_FILE_FITS_RUN.problem(
            f"{name} {message}", key=FILE_KEY, set_by=view.set_by(FILE_KEY, *keys), works=works
        )

    if schedule.num_ranks != pp:
        message = f"has {schedule.num_ranks} ranks, but mesh.pp = {pp}"
        yield misfit(message, ("mesh.pp",), (f"mesh.pp = {schedule.num_ranks}",))
    elif schedule.num_stages % pp:
        message = f"has {schedule.num_stages} stages, which {pp} ranks cannot share evenly "
        message += f"({schedule.num_stages} % {pp} = {schedule.num_stages % pp})"
        down = schedule.num_stages - schedule.num_stages % pp
        yield misfit(message, (), (f"{down or pp} stages", f"{down + pp} stages"))
    else:
        virtual = schedule.num_stages // pp
        if VIRTUAL_KEY in view.entries and view.integer(VIRTUAL_KEY) != virtual:
            message = f"has {schedule.num_stages} stages for {pp} ranks, but {VIRTUAL_KEY} = "
            message += f"{view.integer(VIRTUAL_KEY)}"
            yield misfit(message, (VIRTUAL_KEY,), (f"{VIRTUAL_KEY} = {virtual}",))
    count = num_microbatches(view)
    if schedule.num_microbatches != count:
        total, wanted = view.integer("batch.global_sequences"), schedule.num_microbatches
        size, dp = view.integer("batch.microbatch_sequences"), data_ranks(view)
        message = f"has {wanted} microbatches, but a step has global_sequences / "
        message += f"(microbatch_sequences x data ranks) = {total} / ({size} x {dp}) = {count}"
        works = [f"batch.global_sequences = {wanted * size * dp}"]
        if total % (wanted * dp) == 0:
            works.append(f"batch.microbatch_sequences = {total // (wanted * dp)}")
        yield misfit(message, BATCH_KEYS, works)


PIPELINE_CHECKS = (schedule_fits, file_fits)
