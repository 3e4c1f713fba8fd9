"""Settings of the pipeline that cannot change anything."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.pipeline import (
    AUTO,
    FILE,
    FILE_KEY,
    LIMIT_KEY,
    SCHEDULE_KEY,
    STAGES_KEY,
    TIMES_KEY,
    num_stages,
)
from echelon.config.refusals import no_effect
from echelon.config.times_file import uses_times
from echelon.config.view import View
from echelon.core.errors import Problem


def pipeline_effects(view: View) -> Iterator[Problem]:
    """Yield settings that only some schedules, or a choice of stages by time, read."""
    name = view.word(SCHEDULE_KEY)
    by_file, by_search = f'{SCHEDULE_KEY} = "{FILE}"', f'{SCHEDULE_KEY} = "{AUTO}"'
    if view.integer("mesh.pp") == 1 and name == AUTO:
        why = "there is one pipeline rank, and mesh.pp = 1"
        yield from no_effect(view, SCHEDULE_KEY, why, ["mesh.pp = 2"])
    if name != FILE:
        yield from no_effect(view, FILE_KEY, f'{SCHEDULE_KEY} = "{name}"', [by_file])
    if name not in (FILE, AUTO):
        why = f'it is a limit for schedules that a builder does not make, not for "{name}"'
        yield from no_effect(view, LIMIT_KEY, why, [by_search])
    if not uses_times(view):
        why = "stages are not balanced by it, nor is a schedule searched"
        works = [f'{STAGES_KEY} = "{AUTO}"', by_search]
        yield from no_effect(view, TIMES_KEY, why, works)
    elif num_stages(view) == 1:
        yield from no_effect(view, TIMES_KEY, "there is one stage", ["mesh.pp = 2"])
