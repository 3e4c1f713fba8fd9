# SPDX-License-Identifier: Apache-2.0
"""The chart of a simulated schedule, in slots, as far as it is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.core.event import Event
from echelon.page.figures import ScheduleChart, ScheduleFigure, ScheduleLane
from echelon.schedule.action import ActionKind
from echelon.schedule.build import builder_of
from echelon.schedule.builder import ActionTimes, Builder
from echelon.schedule.simulate import Durations, Simulation, simulate

NAMES = {"naive": "Naive", "gpipe": "GPipe", "1f1b": "1F1B"}
"""How the schedules of the lessons are called, by their names in a plan."""
KINDS = ("forward", "backward")
_NUMBERS = {ActionKind.F.value: 0, ActionKind.BW.value: 1}


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
