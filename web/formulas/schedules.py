# SPDX-License-Identifier: Apache-2.0
"""Schedules that are built in the page: where one starts, and what the engine says of it.

All of this module runs in the page, with the builders, the checker, the search for a circle of
waits and the simulator of `schedule/` that it calls. So a schedule that is dragged together there
is judged by the code that judges a schedule file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.errors import Problem
from echelon.core.rulebook.pipeline import SCHEDULE_CANNOT_DEADLOCK, SCHEDULE_WITHIN_MEMORY
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import SCHEDULES, builder_problems
from echelon.schedule.check import peak_in_flight_per_rank, schedule_faults
from echelon.schedule.deadlock import BlockedRank, draw_deadlock, find_deadlock
from echelon.schedule.simulate import Durations, Simulation, simulate

Word = tuple[str, int, int]
"""An action as the page has it: kind, stage, microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStart:
    """Hold a schedule of the engine, or why it can't be built with these numbers."""

    problems: Sequence[Problem]
    schedule: Schedule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLengths:
    """Hold the seconds of an action of each kind and of a message; BW takes as long as B and W."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleVerdict:
    """Hold what the engine says of a schedule.

    `circle` is that of a deadlock, `drawing` the same as the terminal draws it. `in_flight` has the
    peak of each rank where actions are all there and in order; `simulation` is there where all run,
    also where a limit of memory is passed.
    """

    problems: Sequence[Problem]
    circle: Sequence[BlockedRank]
    drawing: str
    in_flight: Sequence[int]
    simulation: Simulation | None


def schedule_names() -> list[str]:
    """Return the schedules that can be built."""
    return list(SCHEDULES)


def schedule_default_stages(name: str) -> int:
    """Return the stages on each rank that `name` has where nobody says."""
    return SCHEDULES[name].default_virtual_stages


def schedule_start(
    name: str, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> ScheduleStart:
    """Return the schedule `name` of so many stages on each rank."""
    wanted = SCHEDULES[name](
        num_stages=num_ranks * virtual_stages,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
    )
    problems = builder_problems(wanted)
    return ScheduleStart(problems=problems, schedule=None if problems else wanted.schedule())


def schedule_of_words(
    name: str,
    num_microbatches: int,
    stage_ranks: Sequence[int],
    mirrored: Sequence[int],
    rows: Sequence[Sequence[Word]],
) -> Schedule:
    """Return the schedule whose ranks run `rows`; nothing of it is checked."""
    return Schedule(
        name=name,
        num_ranks=len(rows),
        num_microbatches=num_microbatches,
        stage_ranks=tuple(stage_ranks),
        mirrored=tuple(mirrored),
        actions=tuple(
            tuple(Action(ActionKind(kind), stage, microbatch) for kind, stage, microbatch in row)
            for row in rows
        ),
    )


def schedule_verdict(
    schedule: Schedule, lengths: ActionLengths, most_in_flight: int | None
) -> ScheduleVerdict:
    """Return what is wrong with a schedule, and how long it takes where it runs.

    No rank may hold the activations of more than `most_in_flight` (stage, microbatch) pairs; None
    is no limit.
    """
    limits = None if most_in_flight is None else (most_in_flight,) * schedule.num_ranks
    problems = schedule_faults(schedule, most_in_flight=limits)
    # What a rule of a later kind finds fault with has passed those before it.
    first = problems[0].rule if problems else SCHEDULE_WITHIN_MEMORY.id
    circle = find_deadlock(schedule) if first == SCHEDULE_CANNOT_DEADLOCK.id else ()
    runs = first == SCHEDULE_WITHIN_MEMORY.id
    whole = runs or first == SCHEDULE_CANNOT_DEADLOCK.id
    return ScheduleVerdict(
        problems=problems,
        circle=circle,
        drawing=draw_deadlock(schedule, circle),
        in_flight=peak_in_flight_per_rank(schedule) if whole else (),
        simulation=simulate(schedule, durations_of(schedule, lengths)) if runs else None,
    )


def durations_of(schedule: Schedule, lengths: ActionLengths) -> Durations:
    """Return the same lengths for every stage."""
    stages = schedule.num_stages
    whole = lengths.input_gradient_s + lengths.weight_gradient_s
    return Durations(
        forward_s=(lengths.forward_s,) * stages,
        backward_s=(whole,) * stages,
        input_gradient_s=(lengths.input_gradient_s,) * stages,
        weight_gradient_s=(lengths.weight_gradient_s,) * stages,
        transfer_s=(lengths.transfer_s,) * (stages - 1),
    )


def lengths_of(
    forward_s: float, input_gradient_s: float, weight_gradient_s: float, transfer_s: float
) -> ActionLengths:
    """Return the lengths of actions and messages."""
    return ActionLengths(
        forward_s=forward_s,
        input_gradient_s=input_gradient_s,
        weight_gradient_s=weight_gradient_s,
        transfer_s=transfer_s,
    )


def schedule_text(schedule: Schedule) -> str:
    """Return the file that `pipeline.schedule_file` and `echelon schedule` read."""
    return schedule.to_json()
