# SPDX-License-Identifier: Apache-2.0
"""Rules of schedules and of stages: their files, their numbers, each block once and in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config.cluster.settings import read_cluster
from echelon.config.derived.pipeline import (
    AUTO,
    BATCH_KEYS,
    FILE,
    FILE_KEY,
    LIMIT_KEY,
    MOST_VIRTUAL,
    NONE,
    SCHEDULE_KEY,
    STAGES_KEY,
    TIMES_KEY,
    VIRTUAL_KEY,
    in_flight_limits,
    num_microbatches,
    num_stages,
    read_once,
    stages_per_rank,
)
from echelon.config.files.measurements import CPU, FITTED, TimesFile, read_times, uses_times
from echelon.config.rules.violations import (
    RuleViolation,
    SettingChanges,
    Trial,
    Way,
    change_text,
    setting_changes,
    setting_without_effect,
)
from echelon.config.schema import CLUSTER_SOURCES
from echelon.config.view import View, data_ranks, mesh_of
from echelon.core.errors import ConfigError, EchelonError
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.core.rulebook.pipeline import (
    LAYERS_FILL_STAGES,
    SCHEDULE_EVEN_RANKS,
    SCHEDULE_FILE_FITS_RUN,
    SCHEDULE_STAGES_PER_RANK,
    STAGES_COVER_LAYERS,
    STAGES_MATCH_MESH,
    UNIT_TIMES_FIT_RUN,
)
from echelon.core.rules import nearest_divisors
from echelon.core.settings.value_types import toml_text
from echelon.schedule.build import SCHEDULES, builder_problems, unknown_schedule
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import coverage_problem, tied_embedding_problems

if TYPE_CHECKING:
    from echelon.schedule.files import ScheduleFile

PP_KEY = "mesh.pp"


def schedule_fits(view: View) -> Iterator[RuleViolation]:
    """Check that the schedule exists and has the stages and microbatches that it needs."""
    name = view.word(SCHEDULE_KEY)
    if name in (FILE, AUTO):
        return
    if name not in SCHEDULES:
        problem = unknown_schedule(name)
        yield RuleViolation(
            rule=problem.rule,
            key=problem.key,
            message=problem.message,
            set_by=(SCHEDULE_KEY,),
            suggestions=[_schedules_or((*problem.suggestions, FILE, AUTO), name)],
        )
        return
    wanted = SCHEDULES[name](
        num_stages=num_stages(view),
        num_ranks=view.integer(PP_KEY),
        num_microbatches=num_microbatches(view),
    )
    for problem in builder_problems(wanted):
        placed = problem.rule in (SCHEDULE_STAGES_PER_RANK.id, SCHEDULE_EVEN_RANKS.id)
        keys = (VIRTUAL_KEY, PP_KEY) if placed else (PP_KEY, *BATCH_KEYS[:2])
        yield RuleViolation(
            rule=problem.rule,
            key=problem.key,
            message=problem.message,
            set_by=(SCHEDULE_KEY, *keys),
            suggestions=[
                suggest_placements if placed else _batches_or(problem.suggestions, name),
                suggest_schedules,
            ],
        )


def file_fits(view: View) -> Iterator[RuleViolation]:
    """Check that a schedule in a file can be read, is whole, and has the numbers of the run."""
    if view.word(SCHEDULE_KEY) != FILE or view.is_resolved:
        return
    if view.entry(FILE_KEY).value == NONE:
        yield RuleViolation(
            rule=MISSING_SETTING,
            key=FILE_KEY,
            message=f'{FILE_KEY} is not set, and {SCHEDULE_KEY} = "file" reads it',
            set_by=(SCHEDULE_KEY,),
            suggestions=(f'{FILE_KEY} = "schedule.csv"', suggest_schedules),
        )
        return
    try:
        found = read_once(view.path(FILE_KEY))
        limits = in_flight_limits(view)
        same_ranks = found.schedule.num_ranks == view.integer(PP_KEY)
        check_schedule(
            found.schedule, most_in_flight=limits if same_ranks else None, cells=found.cells
        )
    except EchelonError as error:
        for problem in error.problems:
            about_file = replace(problem, key=FILE_KEY)
            yield RuleViolation.from_problem(about_file, origin=problem.set_by or None)
        return
    yield from _numbers_of_file(view, found)
    if view.flag("model.tied"):
        for problem in tied_embedding_problems(found.schedule, key=FILE_KEY):
            yield RuleViolation.from_problem(problem, FILE_KEY, "model.tied")


def _numbers_of_file(view: View, found: ScheduleFile) -> Iterator[RuleViolation]:
    schedule, pp = found.schedule, view.integer(PP_KEY)
    name = found.cells.source

    def misfit(message: str, keys: Sequence[str], *ways: Way) -> RuleViolation:
        return RuleViolation(
            rule=SCHEDULE_FILE_FITS_RUN,
            key=FILE_KEY,
            message=f"{name} {message}",
            set_by=(FILE_KEY, *keys),
            suggestions=ways,
        )

    if schedule.num_ranks != pp:
        message = f"has {schedule.num_ranks} ranks, but mesh.pp = {pp}"
        yield misfit(message, (PP_KEY,), {PP_KEY: schedule.num_ranks})
    elif schedule.num_stages % pp:
        message = f"has {schedule.num_stages} stages, not mesh.pp x {VIRTUAL_KEY} of them "
        message += f"({schedule.num_stages} % {pp} = {schedule.num_stages % pp})"
        down = schedule.num_stages - schedule.num_stages % pp
        yield misfit(message, (), f"{down or pp} stages", f"{down + pp} stages")
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
        changes: list[SettingChanges] = [{"batch.global_sequences": wanted * size * dp}]
        if total % (wanted * dp) == 0:
            changes.append({"batch.microbatch_sequences": total // (wanted * dp)})
        yield misfit(message, BATCH_KEYS, changes)


def search_has_memory(view: View) -> Iterator[RuleViolation]:
    """Check that a search may hold a microbatch once for each stage of a rank."""
    limits = in_flight_limits(view)
    if view.word(SCHEDULE_KEY) == AUTO and limits is not None:
        from echelon.schedule.automatic import memory_problem

        problem = memory_problem([stages_per_rank(view)] * len(limits), limits)
        if problem is not None:
            yield RuleViolation.from_problem(problem, LIMIT_KEY, VIRTUAL_KEY)


def pipeline_settings_without_effect(view: View) -> Iterator[RuleViolation]:
    """Yield settings that only some schedules, or a choice of stages by time, read."""
    name = view.word(SCHEDULE_KEY)
    by_file, by_search = f'{SCHEDULE_KEY} = "{FILE}"', f'{SCHEDULE_KEY} = "{AUTO}"'
    if view.integer(PP_KEY) == 1 and name == AUTO:
        why = "there is one pipeline rank, and mesh.pp = 1"
        yield from setting_without_effect(view, SCHEDULE_KEY, why, "mesh.pp = 2")
    if name != FILE:
        yield from setting_without_effect(view, FILE_KEY, f'{SCHEDULE_KEY} = "{name}"', by_file)
    if name not in (FILE, AUTO):
        why = f'it is a limit for schedules that a builder does not make, not for "{name}"'
        yield from setting_without_effect(view, LIMIT_KEY, why, by_search)
    if not uses_times(view):
        why = "stages are not balanced by it, nor is a schedule searched"
        by_balance = f'{STAGES_KEY} = "{AUTO}"'
        yield from setting_without_effect(view, TIMES_KEY, why, by_balance, by_search)
    elif num_stages(view) == 1:
        yield from setting_without_effect(view, TIMES_KEY, "there is one stage", "mesh.pp = 2")


def suggest_placements(trial: Trial) -> list[str]:
    """Return numbers of ranks, or of stages on each, with which the schedule can be built."""
    pp, virtual = trial.view.integer(PP_KEY), stages_per_rank(trial.view)
    ranks = _ranks_near(trial.view, pp, virtual)
    per_rank = sorted(range(1, MOST_VIRTUAL + 1), key=lambda n: (abs(n - virtual), n))
    by_stages = trial.first(setting_changes(VIRTUAL_KEY, per_rank))
    by_ranks = trial.first(setting_changes(PP_KEY, ranks))
    both = ({PP_KEY: n, VIRTUAL_KEY: each} for n, each in product(ranks, per_rank))
    return [*by_stages, *by_ranks] or trial.first(both, 1)


def suggest_schedules(trial: Trial, names: Collection[str] = SCHEDULES) -> list[str]:
    """Return the other schedules that have a builder and that these numbers fit."""
    return trial.first(setting_changes(SCHEDULE_KEY, names), len(names))


def _schedules_or(known: Sequence[str], name: str) -> Way:
    """Return the schedules that fit, the nearest name first; a file is a schedule, too."""
    files = [{SCHEDULE_KEY: FILE, FILE_KEY: name}] if Path(name).suffix in (".csv", ".json") else []
    names = [schedule for schedule in known if schedule in SCHEDULES]
    return lambda trial: [*trial.first(files, 1), *suggest_schedules(trial, names)] or known


def _batches_or(counts: Iterable[str], name: str) -> Way:
    """Return the nearest batches with a number of microbatches that schedule `name` takes."""
    others = [text for text in counts if text.endswith(" microbatches")]
    return lambda trial: suggest_batches(trial, name) or others


def suggest_batches(trial: Trial, name: str) -> list[str]:
    """Return the nearest batches with a number of microbatches that schedule `name` takes."""
    view = trial.view
    dp, pp, now = data_ranks(view), view.integer(PP_KEY), view.integer(BATCH_KEYS[1])
    share, rest = divmod(view.integer(BATCH_KEYS[0]), dp)
    if rest:
        return []

    def allowed(counts: Iterable[int]) -> Iterator[int]:
        return (n for n in counts if SCHEDULES[name].allows_microbatches(pp, n))

    counts = allowed(share // size for size in nearest_divisors(share, now, limit=share))
    sizes = sorted((share // n for n in counts), key=lambda size: (abs(size - now), size))
    count, most = share // now, 4 * num_stages(view)
    lower = islice(allowed(range(count - 1, 0, -1)), 1)
    higher = islice(allowed(range(count + 1, count + most + 1)), 1)
    totals = ({BATCH_KEYS[0]: n * now * dp} for n in chain(lower, higher))
    return [*trial.first(setting_changes(BATCH_KEYS[1], sizes)), *trial.first(totals)]


def _ranks_near(view: View, pp: int, virtual: int) -> Sequence[int]:
    """Return numbers of ranks around the present one, and around what the blocks can fill."""
    listed = view.stage_lists()
    full = (view.integer("model.layers") if listed is None else len(listed)) // virtual
    top = min(full, pp - 1)
    near = {*range(top - 3, top + 1), *range(pp - 2, pp + 3)} - {pp}
    each, cluster = mesh_of(view).world_size // pp, read_cluster(view)
    room = pp if isinstance(cluster, list) else max(pp, cluster.num_devices // each)
    return sorted((n for n in near if 0 < n <= room), key=lambda n: (abs(n - pp), n))


PIPELINE_FINDERS = (schedule_fits, file_fits, search_has_memory)


MOST_LISTED = 16  # blocks in a message
INSTEAD = (f'{TIMES_KEY} = "none"', "echelon calibrate RUN")
LEFT_TO_US: Way = [{STAGES_KEY: "auto"}]


def layers_fill_stages(view: View) -> Iterator[RuleViolation]:
    """Check that every stage gets a block, unless somebody says which ones do not."""
    if view.stage_lists() is not None:
        return
    stages, layers = num_stages(view), view.integer("model.layers")
    if layers < stages:
        virtual = stages_per_rank(view)
        product = f"mesh.pp = {view.integer('mesh.pp')}"
        product += f" x {virtual} stages on each rank" if virtual > 1 else ""
        yield RuleViolation(
            rule=LAYERS_FILL_STAGES,
            message=f"{product} makes {stages} stages, but {view.model_name} has {layers} blocks",
            key="mesh.pp",
            set_by=("mesh.pp", "model.layers"),
            suggestions=(suggest_placements, *_one_block_each(stages, layers)),
        )


def _one_block_each(stages: int, layers: int) -> Iterator[SettingChanges]:
    """Yield stages of one block each, the last ones empty, where a message has room for them."""
    if stages <= MOST_LISTED:
        yield {STAGES_KEY: [[layer] if layer < layers else [] for layer in range(stages)]}


def stages_match_mesh(view: View) -> Iterator[RuleViolation]:
    """Check that there is one explicit list for each stage."""
    stages = view.stage_lists()
    if stages is not None and len(stages) != num_stages(view):
        yield RuleViolation(
            rule=STAGES_MATCH_MESH,
            message=f"{STAGES_KEY} lists {len(stages)} stages, but pp x virtual_stages = "
            f"{view.integer('mesh.pp')} x {stages_per_rank(view)} = {num_stages(view)}",
            key=STAGES_KEY,
            set_by=(STAGES_KEY, "mesh.pp"),
            suggestions=("one list for each stage", LEFT_TO_US),
        )


def stages_cover_layers(view: View) -> Iterator[RuleViolation]:
    """Check that explicit stages hold each block once, in order; a stage may be empty."""
    stages = view.stage_lists()
    if stages is None:
        return
    layers = view.integer("model.layers")
    faults = coverage_problem(stages, layers)
    if faults:
        yield RuleViolation(
            rule=STAGES_COVER_LAYERS,
            message=f"{STAGES_KEY}: {'; '.join(faults)}",
            key=STAGES_KEY,
            set_by=(STAGES_KEY,),
            suggestions=(_mended(stages, layers), LEFT_TO_US),
        )


def _mended(stages: Sequence[Sequence[int]], layers: int) -> list[SettingChanges]:
    """Return the lists with as many blocks as they have, in order, the last taking what is left."""
    if not stages or layers > 4 * MOST_LISTED:
        return []
    ends = [min(layers, sum(map(len, stages[: s + 1]))) for s in range(len(stages))]
    ends[-1] = layers
    found = [list(range(a, b)) for a, b in zip((0, *ends), ends, strict=False)]
    return [{STAGES_KEY: found}]


def times_fit(view: View) -> Iterator[RuleViolation]:
    """Check that measured times can be read, and were measured with the settings of this run."""
    entry = view.entry(TIMES_KEY)
    if entry.value == NONE:
        return
    try:
        found = read_times(view.path(TIMES_KEY), entry.source)
    except ConfigError as error:
        for problem in error.problems:
            yield RuleViolation.from_problem(problem, origin=problem.set_by)
        return
    yield from _device_fits(view, found)
    here = {key: view.value(key) for key in FITTED}
    wrong = {key: value for key, value in found.fits.items() if not _same(value, here[key])}
    if not wrong:
        return
    parts = [
        f"{key} = {toml_text(value)} (here {toml_text(here[key])})" for key, value in wrong.items()
    ]
    yield RuleViolation(
        rule=UNIT_TIMES_FIT_RUN,
        message=f"{entry.value} was measured with {', '.join(parts)}",
        key=TIMES_KEY,
        set_by=(TIMES_KEY, *wrong),
        suggestions=(change_text(wrong), *INSTEAD),
    )


def _device_fits(view: View, found: TimesFile) -> Iterator[RuleViolation]:
    """Yield that a CPU was measured for a cluster of GPUs, or a GPU for one of CPU ranks."""
    cluster = read_cluster(view)
    if isinstance(cluster, list) or (found.device == CPU) == (cluster.backend == "gloo"):
        return
    yield RuleViolation(
        rule=UNIT_TIMES_FIT_RUN,
        message=f"{view.entry(TIMES_KEY).value} was measured on {_device(found.device)}, but "
        f"the devices of {cluster.name} are {cluster.device.name}",
        key=TIMES_KEY,
        set_by=(TIMES_KEY, *CLUSTER_SOURCES),
        suggestions=INSTEAD,
    )


def _device(name: str) -> str:
    return "CPU cores" if name == CPU else name


def _same(value: object, here: object) -> bool:
    return value == here and isinstance(value, bool) == isinstance(here, bool)


STAGE_FINDERS = (layers_fill_stages, stages_match_mesh, stages_cover_layers, times_fit)
