# SPDX-License-Identifier: Apache-2.0
"""Prove a schedule before any process starts, whoever wrote it.

What is proved, and under which conditions:

- *Complete*: every stage has F once and BW once, or B and W once each, for every microbatch, on
  the rank that owns the stage, and nothing else is in the lists.
- *Ordered*: an action stands after everything it needs that its own rank makes. What other ranks
  make arrives as messages, and is waited for.
- *No deadlock*, when every rank runs its list from left to right, waits before an action until the
  message that it needs has arrived, posts its sends without waiting for them, and posts its
  receives in the order in which the sender posts the sends (`ScheduleMessages.receives`), at the
  latest before the action that needs them. This holds whether a send is buffered or a rendezvous:
  take the order in which the actions run with buffered sends and place each transfer directly
  before the first action for which its receive is posted. Its sender is done by then, as it posts
  its sends in the same order; so nothing in a rendezvous waits for a later thing either.
- *What else a transport must grant* is reported, not assumed: the number of sends that a rank
  leaves pending (`send_window`), and whether both directions may share one queue
  (`shares_queue`).
- *Memory*: the most microbatches whose activations a stage, and a rank, hold at once, from the
  start of F to the end of BW or W; and that no rank holds more than its limit, where there is one.

Not proved: that every rank is alive, or that no other communication (tensor or data parallel)
waits inside an action for a rank that is somewhere else in its list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.errors import InfeasiblePlan, Problem
from echelon.core.rulebook.pipeline import SCHEDULE_CANNOT_DEADLOCK, SCHEDULE_WITHIN_MEMORY
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.deadlock import (
    find_deadlock,
    moves_that_break_deadlock,
    send_window,
    shares_queue,
)
from echelon.schedule.file_rows import NO_FILE, ActionCells
from echelon.schedule.messages import ScheduleMessages
from echelon.schedule.problems import coverage_problems, order_problems, placement_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """State what was proved of a schedule; see the head of this file for the conditions.

    `consumes_in_order` says that every message is used in the order in which its channel carries
    it, so no rank has to keep one aside.
    """

    name: str
    num_actions: int
    num_messages: int
    peak_in_flight_per_stage: tuple[int, ...]
    peak_in_flight_per_rank: tuple[int, ...]
    send_window: int
    shares_queue: bool
    consumes_in_order: bool


def check_schedule(
    schedule: Schedule, *, most_in_flight: Sequence[int] | None = None, cells: ActionCells = NO_FILE
) -> ScheduleReport:
    """Return what holds of `schedule`; InfeasiblePlan names every cell at which it is wrong.

    `most_in_flight` limits, per rank, the (stage, microbatch) pairs whose activations it holds at
    once. `cells` names the actions as they stand in a file. Faults that hide one another are looked
    for in turn: placement, then coverage, then order within a rank, then deadlock between ranks,
    then memory.
    """
    if faults := schedule_faults(schedule, most_in_flight=most_in_flight, cells=cells):
        raise InfeasiblePlan(faults)
    traffic = ScheduleMessages.from_schedule(schedule)
    return ScheduleReport(
        name=schedule.name,
        num_actions=sum(len(row) for row in schedule.actions),
        num_messages=sum(len(messages) for messages in traffic.channels.values()),
        peak_in_flight_per_stage=peak_in_flight_per_stage(schedule),
        peak_in_flight_per_rank=peak_in_flight_per_rank(schedule),
        send_window=send_window(traffic),
        shares_queue=shares_queue(traffic),
        consumes_in_order=all(len(posted) <= 1 for row in traffic.receives for posted in row),
    )


def schedule_faults(
    schedule: Schedule, *, most_in_flight: Sequence[int] | None = None, cells: ActionCells = NO_FILE
) -> list[Problem]:
    """Return every problem of the first kind that `schedule` has; see `check_schedule`."""
    for find in (placement_problems, coverage_problems, order_problems, _deadlock):
        problems = find(schedule, cells)
        if problems:
            return problems
    return [] if most_in_flight is None else _memory(schedule, most_in_flight, cells)


def peak_in_flight_per_rank(schedule: Schedule) -> tuple[int, ...]:
    """Return, per rank, the most (stage, microbatch) pairs whose activations it holds at once."""
    return tuple(_peak(row) for row in schedule.actions)


def peak_in_flight_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return, per stage, the most microbatches whose activations a rank holds of it at once."""
    return tuple(
        max(
            _peak([action for action in schedule.actions[rank] if action.stage == stage])
            for rank in schedule.owners_of(stage)
        )
        for stage in range(schedule.num_stages)
    )


def _peak(actions: Sequence[Action]) -> int:
    return max(_held(actions), default=0)


def _held(actions: Sequence[Action]) -> list[int]:
    """Return what is held during each action: F takes, BW and W free when they have ended.

    B alone frees nothing that W still reads.
    """
    held = 0
    counts: list[int] = []
    for action in actions:
        held += action.kind is ActionKind.F
        counts.append(held)
        held -= action.kind in (ActionKind.BW, ActionKind.W)
    return counts


def _deadlock(schedule: Schedule, cells: ActionCells) -> list[Problem]:
    circle = find_deadlock(schedule)
    if not circle:
        return []
    waits = "; ".join(
        f"rank {wait.rank} cannot start {_named(schedule, wait.rank, wait.action, cells)} before "
        f"{_named(schedule, wait.awaited_rank, wait.awaited_action, cells)} on rank "
        f"{wait.awaited_rank}, which "
        + (
            "waits too"
            if wait.awaited_action == following.action
            else f"stands behind {following.action}"
        )
        for wait, following in zip(circle, circle[1:] + circle[:1], strict=True)
    )
    first = circle[0]
    problem = SCHEDULE_CANNOT_DEADLOCK.problem(
        f"{len(circle)} ranks wait in a circle: {waits}",
        set_by=cells.file_at(first.rank, schedule.actions[first.rank].index(first.action)),
        suggestions=moves_that_break_deadlock(schedule, circle),
    )
    return [problem]


def _named(schedule: Schedule, rank: int, action: Action, cells: ActionCells) -> str:
    """Return an action with its cell, where it comes from a file."""
    if not cells.source:
        return str(action)
    return f"{action} ({cells.at(rank, schedule.actions[rank].index(action))})"


def _memory(schedule: Schedule, most_in_flight: Sequence[int], cells: ActionCells) -> list[Problem]:
    """Name, per rank, the action that passes its limit first, and the limit that would do."""
    assert len(most_in_flight) == schedule.num_ranks, "a limit per rank"
    problems: list[Problem] = []
    for rank, (row, limit) in enumerate(zip(schedule.actions, most_in_flight, strict=True)):
        held = _held(row)
        peak = max(held, default=0)
        if peak > limit:
            place = next(i for i, count in enumerate(held) if count > limit)
            problems.append(
                SCHEDULE_WITHIN_MEMORY.problem(
                    f"rank {rank} holds the activations of {limit + 1} (stage, microbatch) pairs "
                    f"from {row[place]} ({cells.at(rank, place)}) on, and {peak} at its peak; "
                    f"its limit is {limit}",
                    key="pipeline.most_in_flight",
                    set_by=cells.file_at(rank, place),
                    suggestions=[f"a limit of {peak} for rank {rank}"],
                )
            )
    return problems
