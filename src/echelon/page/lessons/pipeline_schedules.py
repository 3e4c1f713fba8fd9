# SPDX-License-Identifier: Apache-2.0
"""The naive schedule, GPipe and 1F1B slot by slot; then GPipe beside 1F1B."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from echelon.core.event import Event
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Frame,
    Lesson,
    LessonControl,
    Place,
    Scene,
    Tile,
    choices,
)
from echelon.planner.view.document import (
    DataTable,
    Fact,
    ScheduleChart,
    ScheduleFigure,
    ScheduleLane,
)
from echelon.schedule.action import ActionKind
from echelon.schedule.build import builder_of, schedule_problems
from echelon.schedule.builders.builder import ActionTimes, Builder
from echelon.schedule.check import peak_in_flight_per_stage
from echelon.schedule.simulate import Durations, Simulation, simulate

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

NAMES = {"naive": "Naive", "gpipe": "GPipe", "1f1b": "1F1B"}
"""How the schedules of the lessons are called, by their names in a plan."""
KINDS = ("forward", "backward")
_NUMBERS = {ActionKind.F.value: 0, ActionKind.BW.value: 1}
SCHEDULES = ("gpipe", "1f1b")
COMPARED_RANKS = (2, 4, 8)  # pipeline ranks
COMPARED_MICROBATCHES = (4, 8, 16)  # of a step
TABLED = (4, 8, 16, 32, 64)
"""Microbatches of the table."""
_LONGER = ActionTimes(forward_s=1, input_gradient_s=1, weight_gradient_s=1)
"""A backward pass of two slots."""


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
            Fact("slots so far", f"{reached} of {run.span}"),
            Fact("forward passes done", f"{forward} of {RANKS * MICROBATCHES}"),
            Fact("backward passes done", f"{len(done) - forward} of {RANKS * MICROBATCHES}"),
            Fact("idle slots so far", str(idle), f"of {RANKS} x {reached} = {RANKS * reached}"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRun:
    """Hold a schedule that was simulated with a forward pass of one slot."""

    builder: Builder
    simulation: Simulation
    times: ActionTimes

    @property
    def span(self) -> int:
        """Return the slots of the step."""
        return round(self.simulation.makespan_s)

    @property
    def actions(self) -> tuple[Event, ...]:
        """Return what ranks compute, by its start."""
        return tuple(one for one in self.simulation.events if one.kind in _NUMBERS)

    def done(self, reached: int) -> tuple[Event, ...]:
        """Return the actions that have ended when a slot begins."""
        return tuple(one for one in self.actions if one.end <= reached)

    def idle(self, reached: int, rank: int) -> int:
        """Return the slots of a rank, of those before `reached`, in which it did nothing."""
        busy = sum(
            min(one.end, reached) - one.start
            for one in self.actions
            if one.rank == rank and one.start < reached
        )
        return round(reached - busy)

    def held(self, reached: int, rank: int) -> tuple[int, ...]:
        """Return the microbatches whose activations a rank holds when a slot begins."""
        own = [one for one in self.done(reached) if one.rank == rank]
        back = {one.microbatch for one in own if one.kind == ActionKind.BW.value}
        return tuple(one.microbatch or 0 for one in own if one.microbatch not in back)


@lru_cache(maxsize=64)
def slot_run(name: str, ranks: int, microbatches: int, backward: int) -> SlotRun:
    """Return a schedule of equal stages, one on each rank; backward takes so many slots."""
    builder = builder_of(name, num_stages=ranks, num_ranks=ranks, num_microbatches=microbatches)
    durations = Durations.uniform(ranks, forward_s=1, backward_s=backward)
    half = backward / 2
    return SlotRun(
        builder=builder,
        simulation=simulate(builder.schedule(), durations),
        times=ActionTimes(forward_s=1, input_gradient_s=half, weight_gradient_s=half),
    )


def gantt(run: SlotRun, reached: int | None = None) -> ScheduleFigure:
    """Return the chart of a run up to a slot, or of the whole step."""
    until = run.span if reached is None else reached
    ranks = range(run.builder.num_ranks)
    idle = sum(run.idle(until, rank) for rank in ranks)
    told = "" if until == run.span else f" of the first {until}"
    chart = ScheduleChart(
        name=NAMES[run.builder.name],
        lanes=tuple(_lane(run, rank, until) for rank in ranks),
        span_s=run.span,
        span_text=f"{run.span} slots",
        bubble_text=f"ranks are idle in {idle} of {until * len(ranks)} slots{told}",
        reached=until,
    )
    return ScheduleFigure(kinds=KINDS, charts=(chart,), unit="slots")


def _lane(run: SlotRun, rank: int, until: int) -> ScheduleLane:
    # An action that is under way is drawn up to where the chart is told.
    own = [one for one in run.actions if one.rank == rank and one.start < until]
    return ScheduleLane(
        label=f"rank {rank}",
        kinds=tuple(_NUMBERS[one.kind] for one in own),
        stages=tuple(one.stage or 0 for one in own),
        microbatches=tuple(one.microbatch or 0 for one in own),
        starts=tuple(round(one.start) for one in own),
        ends=tuple(min(until, round(one.end)) for one in own),
        idle_text=f"{run.idle(until, rank)} of {until} slots",
    )


_CONTROLS = (
    LessonControl(name="schedule", label="schedule", values=tuple(NAMES[one] for one in SCHEDULES)),
    LessonControl(name="p", label="ranks p", values=tuple(map(str, COMPARED_RANKS)), start=1),
    LessonControl(name="m", label="microbatches m", values=tuple(map(str, COMPARED_MICROBATCHES))),
)
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
            facts=(Fact("rule", refused[0].rule),),
        )
    else:
        frame = _compared_frame(slot_run(name, ranks, microbatches, 1))
    return Scene(frames=(frame,), table=_compared_table(ranks))


def _compared_frame(run: SlotRun) -> Frame:
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
            Fact("slots of the step", str(run.span), f"{longer:g} where a backward pass takes two"),
            Fact(
                "efficiency", _percent(1 - simulation.bubble_fraction), "busy slots over all slots"
            ),
            Fact(
                "bubble, of the step",
                _percent(simulation.bubble_fraction),
                f"idle over all: (p-1)/(m+p-1) = {p - 1}/{m + p - 1}",
            ),
            Fact(
                "bubble, of the work",
                _percent(simulation.bubble_overhead),
                f"idle over busy: (p-1)/m = {p - 1}/{m}",
            ),
            Fact(
                "microbatches held, rank by rank",
                ", ".join(map(str, held)),
                "the most whose activations a rank keeps at once",
            ),
        ),
    )


@cache
def _compared_table(ranks: int) -> DataTable:
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
