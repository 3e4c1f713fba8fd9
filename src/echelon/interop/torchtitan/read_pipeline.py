# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a torchtitan configuration: its schedule, and the blocks of each stage.

Stages are listed by the names of their modules, or follow from the number of layers: the embedding
and the head count as layers there (torchtitan/distributed/pipeline_parallel.py).
"""

from __future__ import annotations

import re
from math import ceil
from typing import cast

from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, KeyReader
from echelon.interop.ranks import blocks_of_stages
from echelon.interop.torchtitan.abilities import NAMES, ONE_STAGE
from echelon.schedule.build import PLAIN_SCHEDULE

TABLE = "parallelism"
SCHEDULE = f"{TABLE}.pipeline_parallel_schedule"
PARTS, POINTS = f"{TABLE}.module_fqns_per_model_part", f"{TABLE}.pipeline_parallel_split_points"
SIZE = f"{TABLE}.pipeline_parallel_layers_per_stage"
LESS = tuple(f"{TABLE}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
STAGES = "pipeline.stages"
_LAYER = re.compile(r"layers\.(\d{1,5})")


def read_pipeline(reader: KeyReader, layers: int | None, context: ImportContext) -> None:
    """Map the schedule, and which blocks each stage holds."""
    pp = context.degrees["pp"]
    name = _read_schedule(reader, pp)
    less = [reader.integer(key, FROM_ZERO, setting=STAGES) for key in LESS]
    size = reader.integer(SIZE, COUNT, setting=STAGES)
    if pp == 1:
        reader.skip_all((PARTS, POINTS, SIZE, *LESS), "there is one stage")
        return
    key, stages = _listed(reader)
    if key:
        for other in (PARTS, POINTS, SIZE, *LESS):
            if other != key:
                reader.skip(other, f"{key} lists the stages")
    elif layers:
        key = SIZE
        ends = [1 if count is None else count for count in less]
        count = ceil((layers + sum(ends)) / size) if size else pp * (1 if name in ONE_STAGE else 2)
        if (layers + sum(ends)) // count < max(ends):
            reader.refuse(key, f"{layers} layers + {sum(ends)} in {count} stages", setting=STAGES)
            return
        stages = _counted(layers, count, ends)
        reader.skip_all(LESS, f"{ends[0]} and {ends[1]} count as layers at the ends")
    if stages is None:
        return
    if len(stages) % pp:
        reader.refuse(key, f"{len(stages)} stages on {pp} ranks", setting=STAGES)
        return
    sizes = ", ".join(str(len(stage)) for stage in stages)
    reader.set_or_default(key, STAGES, stages, f"blocks of each stage: {sizes}")
    virtual = len(stages) // pp
    reader.set_or_default(key, "pipeline.virtual_stages", virtual, "stages of a rank")


def _read_schedule(reader: KeyReader, pp: int) -> str:
    names = {word.lower(): name for name, word in NAMES.schedules.items()}
    given = reader.given.get(SCHEDULE)
    if pp == 1:
        reader.skip(SCHEDULE, "there is one stage")
        return PLAIN_SCHEDULE
    if not reader.has(SCHEDULE):
        return PLAIN_SCHEDULE
    here = names.get(str(given).lower())
    if here is None:
        suggestions = [f'"{word}"' for word in NAMES.schedules.values()]
        reader.refuse(SCHEDULE, "there is no such schedule", suggestions=suggestions)
        return PLAIN_SCHEDULE
    reader.set(SCHEDULE, "pipeline.schedule", here, "order of forward and backward passes")
    return here


def _listed(reader: KeyReader) -> tuple[str, list[list[int]] | None]:
    """Return the key that lists the stages, and their blocks; "" and None where none does."""
    if reader.has(PARTS):
        parts = reader.given[PARTS]
        if isinstance(parts, list):
            lists = [cast("list[object]", part) for part in cast("list[object]", parts)]
            names = [[str(name) for name in part] for part in lists]
            found = [[int(m[1]) for n in part if (m := _LAYER.fullmatch(n))] for part in names]
            return PARTS, found
        reader.refuse(PARTS, "a list of modules for each part of the model", setting=STAGES)
        return PARTS, None
    points = reader.given.get(POINTS)
    if not reader.has(POINTS) or points in ([], ""):
        reader.skip(POINTS, "no point of a split")
        return "", None
    reader.refuse(POINTS, f"the old form of {PARTS}", suggestions=(f"{PARTS} = [[...], ...]",))
    return POINTS, None


def _counted(layers: int, stages: int, ends: list[int]) -> list[list[int]]:
    """Return blocks of stages of equal size, where the ends have so many layers less."""
    size, rest = divmod(layers + sum(ends), stages)
    sizes = [size + (stage < rest) for stage in range(stages)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return blocks_of_stages(sizes)
