"""The pipeline of a torchtitan configuration: its schedule, and the blocks of each stage.

Stages are listed by the names of their modules, or follow from the number of layers: the embedding
and the head count as layers there (torchtitan/distributed/pipeline_parallel.py).
"""

from __future__ import annotations

import re
from math import ceil
from typing import cast

from echelon.config.foreign.ledger import COUNT, FROM_ZERO, Ledger
from echelon.config.foreign.surroundings import Surroundings
from echelon.config.foreign.torchtitan_keys import ONE_STAGE, SCHEDULES

TABLE = "parallelism"
SCHEDULE = f"{TABLE}.pipeline_parallel_schedule"
PARTS, POINTS = f"{TABLE}.module_fqns_per_model_part", f"{TABLE}.pipeline_parallel_split_points"
SIZE = f"{TABLE}.pipeline_parallel_layers_per_stage"
LESS = tuple(f"{TABLE}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
STAGES = "pipeline.stages"
LAYER = re.compile(r"layers\.(\d{1,5})")


def read_pipeline(ledger: Ledger, layers: int | None, around: Surroundings) -> None:
    """Map the schedule, and which blocks each stage holds."""
    pp = around.degrees["pp"]
    name = _read_schedule(ledger, pp)
    less = [ledger.whole(key, FROM_ZERO, setting=STAGES) for key in LESS]
    size = ledger.whole(SIZE, COUNT, setting=STAGES)
    if pp == 1:
        for key in (PARTS, POINTS, SIZE, *LESS):
            ledger.skip(key, "there is one stage")
        return
    key, stages = _listed(ledger)
    if key:
        for other in (PARTS, POINTS, SIZE, *LESS):
            if other != key:
                ledger.skip(other, f"{key} lists the stages")
    elif layers:
        key = SIZE
        ends = [1 if count is None else count for count in less]
        count = ceil((layers + sum(ends)) / size) if size else pp * (1 if name in ONE_STAGE else 2)
        if (layers + sum(ends)) // count < max(ends):
            ledger.refuse(key, f"{layers} layers + {sum(ends)} in {count} stages", setting=STAGES)
            return
        stages = _counted(layers, count, ends)
        for other in LESS:
            ledger.skip(other, f"{ends[0]} and {ends[1]} count as layers at the ends")
    if stages is None:
        return
    if len(stages) % pp:
        ledger.refuse(key, f"{len(stages)} stages on {pp} ranks", setting=STAGES)
        return
    source = "" if ledger.has(key) else ledger.default
    sizes = ", ".join(str(len(stage)) for stage in stages)
    ledger.set(key, STAGES, stages, f"blocks of each stage: {sizes}", source=source)
    virtual = len(stages) // pp
    ledger.set(key, "pipeline.virtual_stages", virtual, "stages of a rank", source=source)


def _read_schedule(ledger: Ledger, pp: int) -> str:
    names = {name.lower(): here for name, here in SCHEDULES.items()}
    given = ledger.given.get(SCHEDULE)
    if pp == 1:
        ledger.skip(SCHEDULE, "there is one stage")
        return "1f1b"
    if not ledger.has(SCHEDULE):
        return "1f1b"
    here = names.get(str(given).lower())
    if here is None:
        works = [f'"{name}"' for name in SCHEDULES]
        ledger.refuse(SCHEDULE, "there is no such schedule", works=works)
        return "1f1b"
    ledger.set(SCHEDULE, "pipeline.schedule", here, "order of forward and backward passes")
    return here


def _listed(ledger: Ledger) -> tuple[str, list[list[int]] | None]:
    """Return the key that lists the stages, and their blocks; "" and None where none does."""
    if ledger.has(PARTS):
        parts = ledger.given[PARTS]
        if isinstance(parts, list):
            lists = [cast("list[object]", part) for part in cast("list[object]", parts)]
            names = [[str(name) for name in part] for part in lists]
            found = [[int(m[1]) for n in part if (m := LAYER.fullmatch(n))] for part in names]
            return PARTS, found
        ledger.refuse(PARTS, "a list of modules for each part of the model", setting=STAGES)
        return PARTS, None
    points = ledger.given.get(POINTS)
    if not ledger.has(POINTS) or points in ([], ""):
        ledger.skip(POINTS, "no point of a split")
        return "", None
    ledger.refuse(POINTS, f"the old form of {PARTS}", works=(f"{PARTS} = [[...], ...]",))
    return POINTS, None


def _counted(layers: int, stages: int, ends: list[int]) -> list[list[int]]:
    """Return blocks of stages of equal size, where the ends have so many layers less."""
    size, rest = divmod(layers + sum(ends), stages)
    sizes = [size + (stage < rest) for stage in range(stages)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [list(range(start, start + n)) for start, n in zip(starts, sizes, strict=True)]
