"""Small plans of every schedule, of a written one and of a searched one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.plan import Plan
from echelon.schedule.automatic import find_schedule
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.simulate import Durations
from tests.parallel.layouts import NANO, plan_of
from tests.walks.matrix.pipeline_cases import AUTO, FILE, num_microbatches

EVERY = (*SCHEDULES, FILE, AUTO)
"""The names of all schedules."""

EIGHT = replace(NANO, name="eight", layers=8)
"""A block for each stage of four ranks with two stages each."""


def pipeline_plan(schedule: str, pp: int, microbatches: str = "2p", **changes: Any) -> Plan:
    """Return a plan of eight blocks; `microbatches` as in the proven cases ("p", "2p", "3p+1")."""
    builder = SCHEDULES.get(schedule)
    virtual = 1 if builder is None else builder.default_virtual_stages
    stages = pp * virtual if builder is None else builder.stages_for(pp, virtual)
    count = num_microbatches(schedule, pp, microbatches)
    chosen: dict[str, Any] = {
        "model": EIGHT,
        "pp": pp,
        "schedule": schedule,
        "virtual_stages": virtual,
        "microbatches": count,
        "stages": _even(stages),
        "rows": () if builder else _rows(schedule, pp, count),
    }
    return plan_of(**{**chosen, **changes})


def _even(stages: int) -> tuple[tuple[int, ...], ...]:
    each = EIGHT.layers // stages
    return tuple(tuple(range(s * each, (s + 1) * each)) for s in range(stages))


def _rows(schedule: str, pp: int, count: int) -> tuple[str, ...]:
    """Return GPipe with every second backward pass split, as a file; or what a search finds."""
    if schedule == AUTO:
        uneven = tuple(1.0 + stage / pp for stage in range(pp))
        times = Durations(
            forward_s=uneven,
            backward_s=tuple(2 * one for one in uneven),
            input_gradient_s=uneven,
            weight_gradient_s=uneven,
            transfer_s=(0.2,) * (pp - 1),
        )
        found = find_schedule(tuple(range(pp)), count, times, most_in_flight=(pp + 1,) * pp)
        return tuple(" ".join(map(str, row)) for row in found.schedule.actions)
    planned = build_schedule("gpipe", num_stages=pp, num_ranks=pp, num_microbatches=count)
    rows: list[str] = []
    for row in planned.actions:
        words = [str(action) for action in row if action.kind.value == "F"]
        late: list[str] = []
        for action in row[len(words) :]:
            place = f"{action.stage}.{action.microbatch}"
            words += [f"B{place}"] if action.microbatch % 2 else [f"BW{place}"]
            late += [f"W{place}"] if action.microbatch % 2 else []
        rows.append(" ".join([*words, *late]))
    return tuple(rows)
