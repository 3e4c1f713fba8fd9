"""What must hold of a schedule: it exists, takes the numbers of the run; in a file it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from echelon.config.pipeline import (
    AUTO,
    BATCH_KEYS,
    FILE,
    FILE_KEY,
    NONE,
    SCHEDULE_KEY,
    VIRTUAL_KEY,
    in_flight_limits,
    num_microbatches,
    num_stages,
    read_once,
)
from echelon.config.pipeline_works import (
    Changes,
    batches_that_work,
    placements_that_work,
    schedules_that_work,
    settings_that_work,
)
from echelon.config.view import View, data_ranks
from echelon.core.errors import EchelonError, Problem
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.core.rulebook.pipeline import SCHEDULE_FILE_FITS_RUN
from echelon.core.rulebook.schedule import (
    SCHEDULE_EVEN_RANKS,
    SCHEDULE_KNOWN,
    SCHEDULE_STAGES_PER_RANK,
)
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.check import check_schedule
from echelon.schedule.files import ScheduleFile
from echelon.schedule.plan_problems import tied_problems


def schedule_fits(view: View) -> Iterator[Problem]:
    """Check that the schedule exists and has the stages and microbatches that it needs."""
    name = view.word(SCHEDULE_KEY)
    if name in (FILE, AUTO):
        return
    if name not in SCHEDULES:
        # The other numbers do not matter: it reports the name alone.
        for problem in schedule_problems(name, num_stages=1, num_ranks=1, num_microbatches=1):
            works = schedules_that_work(view) or (*problem.works, FILE, AUTO)
            yield replace(problem, set_by=view.set_by(SCHEDULE_KEY), works=tuple(works))
        return
    pp = view.integer("mesh.pp")
    for problem in schedule_problems(
        name, num_stages=num_stages(view), num_ranks=pp, num_microbatches=num_microbatches(view)
    ):
        assert problem.rule != SCHEDULE_KNOWN.id
        if problem.rule in (SCHEDULE_STAGES_PER_RANK.id, SCHEDULE_EVEN_RANKS.id):
            keys, works = (VIRTUAL_KEY, "mesh.pp"), placements_that_work(view)
        else:
            counts = [text for text in problem.works if text.endswith(" microbatches")]
            keys, works = ("mesh.pp", *BATCH_KEYS[:2]), batches_that_work(view, name) or counts
        works += schedules_that_work(view)
        yield replace(problem, set_by=view.set_by(SCHEDULE_KEY, *keys), works=tuple(works))


def file_fits(view: View) -> Iterator[Problem]:
    """Check that a schedule in a file can be read, is whole, and has the numbers of the run."""
    if view.word(SCHEDULE_KEY) != FILE:
        return
    if view.entry(FILE_KEY).value == NONE:
        yield MISSING_SETTING.problem(
            f'{FILE_KEY} is not set, and {SCHEDULE_KEY} = "file" reads it',
            key=FILE_KEY,
            set_by=view.set_by(SCHEDULE_KEY),
            works=(f'{FILE_KEY} = "schedule.csv"', *schedules_that_work(view)),
        )
        return
    set_by = view.set_by(FILE_KEY)
    try:
        found = read_once(view.path(FILE_KEY))
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

    def misfit(message: str, keys: Sequence[str], *changes: Changes) -> Problem:
        return SCHEDULE_FILE_FITS_RUN.problem(
            f"{name} {message}",
            key=FILE_KEY,
            set_by=view.set_by(FILE_KEY, *keys),
            works=settings_that_work(view, changes),
        )

    if schedule.num_ranks != pp:
        message = f"has {schedule.num_ranks} ranks, but mesh.pp = {pp}"
        yield misfit(message, ("mesh.pp",), {"mesh.pp": schedule.num_ranks})
    elif schedule.num_stages % pp:
        message = f"has {schedule.num_stages} stages, not mesh.pp x {VIRTUAL_KEY} of them "
        message += f"({schedule.num_stages} % {pp} = {schedule.num_stages % pp})"
        down = schedule.num_stages - schedule.num_stages % pp
        works = (f"{down or pp} stages", f"{down + pp} stages")
        yield replace(misfit(message, ()), works=works)
    else:
        virtual = schedule.num_stages // pp
        if VIRTUAL_KEY in view.entries and view.integer(VIRTUAL_KEY) != virtual:
            message = f"has {schedule.num_stages} stages for {pp} ranks, but {VIRTUAL_KEY} = "
            message += f"{view.integer(VIRTUAL_KEY)}"
            yield misfit(message, (VIRTUAL_KEY,), {VIRTUAL_KEY: virtual})
    count = num_microbatches(view)
    if schedule.num_microbatches != count:
        total, wanted = view.integer("batch.global_sequences"), schedule.num_microbatches
        size, dp = view.integer("batch.microbatch_sequences"), data_ranks(view)
        message = f"has {wanted} microbatches, but a step has global_sequences / "
        message += f"(microbatch_sequences x data ranks) = {total} / ({size} x {dp}) = {count}"
        changes: list[Changes] = [{"batch.global_sequences": wanted * size * dp}]
        if total % (wanted * dp) == 0:
            changes.append({"batch.microbatch_sequences": total // (wanted * dp)})
        yield misfit(message, BATCH_KEYS, *changes)


PIPELINE_CHECKS = (schedule_fits, file_fits)
