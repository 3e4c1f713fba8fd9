# SPDX-License-Identifier: Apache-2.0
"""The naive schedule, GPipe and 1F1B slot by slot: what runs, what is idle, what is held."""

from __future__ import annotations

from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.diagram import DiagramFigure, Place, Tile
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene
from echelon.page.lessons.pipeline.gantt import NAMES, SlotRun, gantt, slot_run
from echelon.schedule.action import ActionKind

RANKS = 4
"""Pipeline ranks, a stage each."""
MICROBATCHES = 4
"""Microbatches of a step."""
STEPS = 5
"""Frames of a schedule: after each the chart is told up to a slot."""

_LOOKS = {
    "naive": "One microbatch goes through all ranks and back before the next one starts.",
    "gpipe": "All forward passes come first, then all backward passes.",
    "1f1b": "Each rank starts backward as soon as it can, then alternates: one forward, one back.",
}


def pipeline_walk() -> Lesson:
    """Return the lesson: three schedules of four ranks, each in five steps."""
    control = LessonControl(name="schedule", label="schedule", values=tuple(NAMES.values()))
    runs = [slot_run(name, RANKS, MICROBATCHES, 1) for name in NAMES]
    return Lesson(
        id="pipeline-slots",
        topic="Pipeline parallel",
        title="A pipeline slot by slot: naive, GPipe, 1F1B",
        rows=("M18",),
        summary=(
            f"{RANKS} ranks hold a stage each, and {MICROBATCHES} microbatches go through them. "
            "What a rank waits is idle time, the bubble."
        ),
        source="the builders of schedules and the simulator that echelon schedule runs",
        controls=(control,),
        scenes=tuple(Scene(frames=_frames(run), table=_table(runs)) for run in runs),
        corrections=corrections("llm-training-40"),
        commands=tuple(
            f"echelon schedule show {name} -p {RANKS} -m {MICROBATCHES}" for name in NAMES
        ),
    )


def _frames(run: SlotRun) -> tuple[Frame, ...]:
    reached = [round(run.span * step / STEPS) for step in range(1, STEPS + 1)]
    return tuple(_frame(run, slot) for slot in reached)


def _frame(run: SlotRun, reached: int) -> Frame:
    ranks, done = range(RANKS), run.done(reached)
    forward = sum(one.kind == ActionKind.F.value for one in done)
    idle = sum(run.idle(reached, rank) for rank in ranks)
    working = {one.rank for one in run.actions if one.start < reached <= one.end}
    said = f"In slot {reached}, {len(working)} of {RANKS} ranks work."
    if reached == run.span:
        share = run.simulation.bubble_fraction
        said = f"The step ends after {run.span} slots; ranks were idle for {100 * share:.1f} %."
    return Frame(
        caption=f"{_LOOKS[run.builder.name]} {said}",
        figures=(gantt(run, reached), _holding(run, reached)),
        facts=(
            Fact(name="slots so far", value=f"{reached} of {run.span}"),
            Fact(name="forward passes done", value=f"{forward} of {RANKS * MICROBATCHES}"),
            Fact(
                name="backward passes done",
                value=f"{len(done) - forward} of {RANKS * MICROBATCHES}",
            ),
            Fact(
                name="idle slots so far",
                value=str(idle),
                note=f"of {RANKS} x {reached} = {RANKS * reached}",
            ),
        ),
    )


def _holding(run: SlotRun, reached: int) -> DiagramFigure:
    """Return the ranks with the microbatches whose activations they hold now."""
    return DiagramFigure(
        kinds=("activations held for backward",),
        places=tuple(
            Place(
                label=f"rank {rank}",
                note=f"stage {rank} holds {len(run.held(reached, rank))}",
                tiles=tuple(
                    Tile(
                        id=f"{rank}-{microbatch}",
                        label=str(microbatch),
                        words=f"microbatch {microbatch} on rank {rank}",
                        kind=0,
                        column=place,
                    )
                    for place, microbatch in enumerate(run.held(reached, rank))
                ),
            )
            for rank in range(RANKS)
        ),
    )


def _table(runs: list[SlotRun]) -> DataTable:
    rows = tuple(
        (
            NAMES[run.builder.name],
            str(run.span),
            f"{100 * run.builder.bubble_fraction(run.times):.1f} %",
            ", ".join(str(run.builder.peak_in_flight(stage)) for stage in range(RANKS)),
        )
        for run in runs
    )
    return DataTable(
        head=("schedule", "slots", "bubble of the step", "most held, rank by rank"),
        rows=rows,
        right=(1, 2),
    )
