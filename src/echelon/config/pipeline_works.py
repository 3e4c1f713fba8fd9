"""Settings of the pipeline that do work, for errors to suggest: each is tried before it is named.

A suggestion is kept where the fault that it is to mend is gone and no other one has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product

from echelon.config.cluster import read_cluster
from echelon.config.entries import Entry
from echelon.config.kinds import toml_text
from echelon.config.pipeline import (
    AUTO,
    FILE,
    FILE_KEY,
    LIMIT_KEY,
    MOST_VIRTUAL,
    NONE,
    SCHEDULE_KEY,
    VIRTUAL_KEY,
    num_microbatches,
    num_stages,
    schedule_file,
    stages_per_rank,
)
from echelon.config.pipeline_effects import pipeline_effects
from echelon.config.times_file import times_fit
from echelon.config.view import Unavailable, View, data_ranks, mesh_of
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.core.rulebook.pipeline import (
    LAYERS_FILL_STAGES,
    SCHEDULE_FILE_FITS_RUN,
    STAGES_COVER_LAYERS,
    STAGES_MATCH_MESH,
)
from echelon.core.rulebook.schedule import SCHEDULE_KNOWN
from echelon.core.rulebook.schedule_search import SCHEDULE_SEARCH_HAS_MEMORY
from echelon.core.rules import nearest_divisors
from echelon.schedule.build import SCHEDULES, schedule_problems
from echelon.schedule.plan_problems import uncovered

PP_KEY, SIZE_KEY, BATCH_KEY = "mesh.pp", "batch.microbatch_sequences", "batch.global_sequences"
MOST_NAMED = 2

Changes = Mapping[str, object]


def settings_that_work(view: View, changes: Iterable[Changes], limit: int = 100) -> list[str]:
    """Return the first of `changes` that mend something and break nothing, as they are set."""
    before = faults(view)
    return list(
        islice(
            (
                " with ".join(f"{key} = {toml_text(value)}" for key, value in change.items())
                for change in changes
                if faults(_changed(view, change)) < before
            ),
            limit,
        )
    )


def placements_that_work(view: View) -> list[str]:
    """Return numbers of ranks, or of stages on each, with which the schedule can be built."""
    pp, virtual = view.integer(PP_KEY), stages_per_rank(view)
    ranks = _ranks_near(view, pp, virtual)
    per_rank = sorted(range(1, MOST_VIRTUAL + 1), key=lambda n: (abs(n - virtual), n))
    by_ranks = settings_that_work(view, ({PP_KEY: n} for n in ranks), MOST_NAMED)
    by_stages = settings_that_work(view, ({VIRTUAL_KEY: n} for n in per_rank), MOST_NAMED)
    if by_ranks or by_stages:
        return [*by_stages, *by_ranks]
    both = ({PP_KEY: n, VIRTUAL_KEY: each} for n, each in product(ranks, per_rank))
    return settings_that_work(view, both, 1)


def schedules_that_work(view: View) -> list[str]:
    """Return the other schedules that have a builder and that these numbers fit."""
    return settings_that_work(view, ({SCHEDULE_KEY: name} for name in SCHEDULES))


def batches_that_work(view: View, name: str) -> list[str]:
    """Return the nearest batches with a number of microbatches that schedule `name` takes."""
    dp, pp, now = data_ranks(view), view.integer(PP_KEY), view.integer(SIZE_KEY)
    share, rest = divmod(view.integer(BATCH_KEY), dp)
    if rest:
        return []

    def allowed(counts: Iterable[int]) -> Iterator[int]:
        return (n for n in counts if SCHEDULES[name].allows_microbatches(pp, n))

    counts = allowed(share // size for size in nearest_divisors(share, now, limit=share))
    sizes = sorted((share // n for n in counts), key=lambda size: (abs(size - now), size))
    count, most = share // now, 4 * num_stages(view)
    lower = islice(allowed(range(count - 1, 0, -1)), 1)
    higher = islice(allowed(range(count + 1, count + most + 1)), 1)
    totals = ({BATCH_KEY: n * now * dp} for n in chain(lower, higher))
    return [
        *settings_that_work(view, ({SIZE_KEY: size} for size in sizes), MOST_NAMED),
        *settings_that_work(view, totals),
    ]


def faults(view: View) -> frozenset[tuple[str, str]]:
    """Return the rules about the pipeline that are broken, each with the setting or the number."""
    found: set[tuple[str, str]] = set()
    for find in (_of_schedule, _of_stages):
        try:
            found.update(find(view))
        except Unavailable:
            continue
    for check in (pipeline_effects, times_fit):
        try:
            found.update((problem.rule, problem.key) for problem in check(view))
        except Unavailable:
            continue
    return frozenset(found)


def _changed(view: View, change: Changes) -> View:
    entries = {key: Entry(value=value, source="") for key, value in change.items()}
    return replace(view, entries={**view.entries, **entries})


def _ranks_near(view: View, pp: int, virtual: int) -> Sequence[int]:
    """Return numbers of ranks around the present one, and around what the blocks can fill."""
    listed = view.stage_lists()
    full = (view.integer("model.layers") if listed is None else len(listed)) // virtual
    top = min(full, pp - 1)
    near = {*range(top - 3, top + 1), *range(pp - 2, pp + 3)} - {pp}
    each, cluster = mesh_of(view).world_size // pp, read_cluster(view)
    room = pp if isinstance(cluster, list) else max(pp, cluster.num_devices // each)
    return sorted((n for n in near if 0 < n <= room), key=lambda n: (abs(n - pp), n))


def _of_schedule(view: View) -> Iterator[tuple[str, str]]:
    name, pp = view.word(SCHEDULE_KEY), view.integer(PP_KEY)
    if name == FILE:
        yield from _of_file(view)
    elif name == AUTO:
        most = view.entry(LIMIT_KEY).value
        if isinstance(most, int) and most < stages_per_rank(view):
            yield SCHEDULE_SEARCH_HAS_MEMORY.id, LIMIT_KEY
    elif name not in SCHEDULES:
        yield SCHEDULE_KNOWN.id, SCHEDULE_KEY
    else:
        stages, count = num_stages(view), num_microbatches(view)
        for problem in schedule_problems(
            name, num_stages=stages, num_ranks=pp, num_microbatches=count
        ):
            yield problem.rule, problem.key


def _of_file(view: View) -> Iterator[tuple[str, str]]:
    if view.entry(FILE_KEY).value == NONE:
        yield MISSING_SETTING.id, FILE_KEY
        return
    schedule, pp = schedule_file(view).schedule, view.integer(PP_KEY)
    if schedule.num_ranks != pp:
        yield SCHEDULE_FILE_FITS_RUN.id, PP_KEY
    elif schedule.num_stages % pp:
        yield SCHEDULE_FILE_FITS_RUN.id, FILE_KEY
    elif VIRTUAL_KEY in view.entries and view.integer(VIRTUAL_KEY) != stages_per_rank(view):
        yield SCHEDULE_FILE_FITS_RUN.id, VIRTUAL_KEY
    if schedule.num_microbatches != num_microbatches(view):
        yield SCHEDULE_FILE_FITS_RUN.id, BATCH_KEY


def _of_stages(view: View) -> Iterator[tuple[str, str]]:
    layers, stages, listed = view.integer("model.layers"), num_stages(view), view.stage_lists()
    if listed is None:
        if layers < stages:
            yield LAYERS_FILL_STAGES.id, ""
        return
    if len(listed) != stages:
        yield STAGES_MATCH_MESH.id, ""
    if uncovered(listed, layers):
        yield STAGES_COVER_LAYERS.id, ""
