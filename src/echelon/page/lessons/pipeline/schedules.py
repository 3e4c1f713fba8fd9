# SPDX-License-Identifier: Apache-2.0
"""GPipe beside 1F1B: how long a step takes, what is idle by both definitions, what is held."""

from __future__ import annotations

from functools import cache

from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices
from echelon.page.lessons.pipeline.gantt import NAMES, SlotRun, gantt, slot_run
from echelon.schedule.build import builder_of, schedule_problems
from echelon.schedule.builder import ActionTimes
from echelon.schedule.check import peak_in_flight_per_stage

SCHEDULES = ("gpipe", "1f1b")
RANKS = (2, 4, 8)  # pipeline ranks
MICROBATCHES = (4, 8, 16)  # of a step
TABLED = (4, 8, 16, 32, 64)
"""Microbatches of the table."""

_CONTROLS = (
    LessonControl(name="schedule", label="schedule", values=tuple(NAMES[one] for one in SCHEDULES)),
    LessonControl(name="p", label="ranks p", values=tuple(map(str, RANKS)), start=1),
    LessonControl(name="m", label="microbatches m", values=tuple(map(str, MICROBATCHES))),
)
_LONGER = ActionTimes(forward_s=1, input_gradient_s=1, weight_gradient_s=1)
"""A backward pass of two slots."""
_BY_TITLE = {NAMES[one]: one for one in SCHEDULES}


def pipeline_schedules() -> Lesson:
    """Return the lesson: a chart for each choice, with the closed forms beside the simulation."""
    return Lesson(
        id="gpipe-and-1f1b",
        topic="Pipeline parallel",
        title="GPipe and 1F1B: one bubble, less memory",
        rows=("M7",),
        summary=(
            "Both orders take equally long and leave ranks idle equally often. 1F1B starts "
            "backward passes early, so that a rank holds fewer microbatches."
        ),
        source="the builders of schedules and the simulator that echelon schedule runs",
        controls=_CONTROLS,
        scenes=tuple(
            _scene(_BY_TITLE[one["schedule"]], int(one["p"]), int(one["m"]))
            for one in choices(_CONTROLS)
        ),
        corrections=corrections(
            "distributed-21",
            "distributed-22",
            "distributed-23",
            "distributed-24",
            "distributed-25",
            "llm-training-37",
            "llm-training-38",
            "llm-training-39",
        ),
        commands=("echelon schedule show 1f1b -p 4 -m 4",),
    )


def _scene(name: str, ranks: int, microbatches: int) -> Scene:
    refused = schedule_problems(
        name, num_stages=ranks, num_ranks=ranks, num_microbatches=microbatches
    )
    if refused:
        frame = Frame(
            caption=f"{NAMES[name]} is refused here: {refused[0].message}.",
            figures=(),
            facts=(Fact(name="rule", value=refused[0].rule),),
        )
    else:
        frame = _frame(slot_run(name, ranks, microbatches, 1))
    return Scene(frames=(frame,), table=_table(ranks))


def _frame(run: SlotRun) -> Frame:
    builder, simulation = run.builder, run.simulation
    held = peak_in_flight_per_stage(builder.schedule())
    p, m = builder.num_ranks, builder.num_microbatches
    longer = builder.idle_s(_LONGER) + builder.busy_s(_LONGER)
    return Frame(
        caption=(
            f"{NAMES[builder.name]} with {m} microbatches on {p} ranks: a step takes {run.span} "
            f"slots, and each rank works in {round(max(simulation.busy_s))} of them."
        ),
        figures=(gantt(run),),
        facts=(
            Fact(
                name="slots of the step",
                value=str(run.span),
                note=f"{longer:g} where a backward pass takes two",
            ),
            Fact(
                name="efficiency",
                value=_percent(1 - simulation.bubble_fraction),
                note="busy slots over all slots",
            ),
            Fact(
                name="bubble, of the step",
                value=_percent(simulation.bubble_fraction),
                note=f"idle over all: (p-1)/(m+p-1) = {p - 1}/{m + p - 1}",
            ),
            Fact(
                name="bubble, of the work",
                value=_percent(simulation.bubble_overhead),
                note=f"idle over busy: (p-1)/m = {p - 1}/{m}",
            ),
            Fact(
                name="microbatches held, rank by rank",
                value=", ".join(map(str, held)),
                note="the most whose activations a rank keeps at once",
            ),
        ),
    )


@cache
def _table(ranks: int) -> DataTable:
    rows: list[tuple[str, ...]] = []
    for many in TABLED:
        gpipe, other = (
            builder_of(name, num_stages=ranks, num_ranks=ranks, num_microbatches=many)
            if many >= ranks or name == "gpipe"
            else None
            for name in SCHEDULES
        )
        assert gpipe is not None, "GPipe takes any number"
        rows.append(
            (
                str(many),
                _percent(gpipe.bubble_fraction()),
                _percent(gpipe.bubble_overhead()),
                str(gpipe.peak_in_flight(0)),
                "refused" if other is None else str(other.peak_in_flight(0)),
            )
        )
    head = ("m", "bubble of the step", "bubble of the work", "rank 0 holds, GPipe", "1F1B")
    return DataTable(head=head, rows=tuple(rows), right=tuple(range(5)))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
