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

Functions of problems return those of one kind, and take for granted that there are none of the
kinds before it. They name the rank, the place in its list (or the cell of the file that it came
from), and the right value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from echelon.core.errors import InfeasiblePlan, Problem
from echelon.core.rulebook.pipeline import (
    SCHEDULE_CANNOT_DEADLOCK,
    SCHEDULE_COVERS_ONCE,
    SCHEDULE_KEEPS_ORDER,
    SCHEDULE_PLACES_STAGES,
    SCHEDULE_WITHIN_MEMORY,
)
from echelon.core.rules import Rule
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.deadlock import (
    find_deadlock,
    moves_that_break_deadlock,
    send_window,
    shares_queue,
)
from echelon.schedule.messages import ScheduleMessages, required_results, result_name
from echelon.schedule.rows import NO_FILE, ActionCells


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
    return tuple(peak_in_flight(row) for row in schedule.actions)


def peak_in_flight_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return, per stage, the most microbatches whose activations a rank holds of it at once."""
    return tuple(
        max(
            peak_in_flight([action for action in schedule.actions[rank] if action.stage == stage])
            for rank in schedule.owners_of(stage)
        )
        for stage in range(schedule.num_stages)
    )


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Most (stage, microbatch) pairs whose activations a list of actions holds at once."""
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


MOST_NAMED = 8  # actions in a message


def placement_problems(schedule: Schedule, cells: ActionCells = NO_FILE) -> list[Problem]:
    """Return stages on ranks that do not exist, and ranks without a stage."""
    return _first_problems(SCHEDULE_PLACES_STAGES, list(_misplaced(schedule, cells)))


def coverage_problems(schedule: Schedule, cells: ActionCells = NO_FILE) -> list[Problem]:
    """Return actions that are missing, doubled, on the wrong rank, or of no stage or microbatch."""
    places: dict[Action, list[tuple[int, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            places.setdefault(action, []).append((rank, place))
    faults = [*_strays(schedule, cells), *_doubled(places, cells)]
    missing, others = _gaps(schedule, places, cells)
    return _first_problems(SCHEDULE_COVERS_ONCE, [*faults, *missing], others)


def order_problems(schedule: Schedule, cells: ActionCells = NO_FILE) -> list[Problem]:
    """Return actions that stand before something of their own rank that they need."""
    faults: list[Problem] = []
    for rank, row in enumerate(schedule.actions):
        places = {result_name(action): place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for need in required_results(action, schedule.num_stages):
                made = places.get(need)
                if made is not None and made > place:
                    text = (
                        f"rank {rank}: {action} at {cells.at(rank, place)} needs {row[made]}, "
                        f"which is at {cells.at(rank, made)}"
                    )
                    suggestions = (f"{action} behind {row[made]}",)
                    where = cells.file_at(rank, place)
                    faults.append(
                        SCHEDULE_KEEPS_ORDER.problem(text, set_by=where, suggestions=suggestions)
                    )
    return _first_problems(SCHEDULE_KEEPS_ORDER, faults)


def _first_problems(rule: Rule, faults: list[Problem], others: int = 0) -> list[Problem]:
    """Return the first few faults, and count the rest and `others` that are like them.

    One fault of a builder repeats for every microbatch.
    """
    more = max(0, len(faults) - MOST_NAMED) + others
    rest = [rule.problem(f"and {more} more of the same kind")] if more else []
    return [*faults[:MOST_NAMED], *rest]


def _misplaced(schedule: Schedule, cells: ActionCells) -> Iterator[Problem]:
    ranks, where = schedule.num_ranks, cells.source
    if ranks < 1 or not schedule.stage_ranks or schedule.num_microbatches < 1:
        yield SCHEDULE_PLACES_STAGES.problem(
            f"{ranks} ranks, {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} microbatches; each must be at least 1",
            set_by=where,
        )
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < ranks:
            text = f"stage {stage} is on rank {rank}, but ranks are 0 to {ranks - 1}"
            yield SCHEDULE_PLACES_STAGES.problem(text, set_by=where)
    wrong = [one for one in schedule.mirrored if not 0 <= one < schedule.num_microbatches]
    if wrong:
        named = ", ".join(map(str, sorted(wrong)))
        yield SCHEDULE_PLACES_STAGES.problem(
            f"mirrored microbatches [{named}] do not exist", set_by=where
        )
    if len(schedule.actions) != ranks:
        text = f"{len(schedule.actions)} lists of actions for {ranks} ranks"
        yield SCHEDULE_PLACES_STAGES.problem(text, set_by=where)
        return
    owners = {rank for stage in range(schedule.num_stages) for rank in schedule.owners_of(stage)}
    for rank in range(ranks):
        if rank not in owners:
            yield SCHEDULE_PLACES_STAGES.problem(
                f"rank {rank} owns no stage", set_by=cells.file_at(rank)
            )


def _strays(schedule: Schedule, cells: ActionCells) -> Iterator[Problem]:
    """Yield actions outside of the stages and microbatches, and those on a rank not theirs."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            at = f"rank {rank}, {cells.at(rank, place)}: {action}"
            where = cells.file_at(rank, place)
            if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
                text = f"{at} is outside of the {stages} stages and {microbatches} microbatches"
                yield SCHEDULE_COVERS_ONCE.problem(text, set_by=where)
            elif (owner := schedule.rank_of(action.stage, action.microbatch)) != rank:
                text = f"{at}, but stage {action.stage} is on rank {owner}"
                if schedule.mirrored:
                    text += f" for microbatch {action.microbatch}"
                yield SCHEDULE_COVERS_ONCE.problem(
                    text, set_by=where, suggestions=(f"{action} on rank {owner}",)
                )


def _doubled(places: dict[Action, list[tuple[int, int]]], cells: ActionCells) -> Iterator[Problem]:
    for action, found in places.items():
        if len(found) > 1:
            named = [f"rank {rank}, {cells.at(rank, place)}" for rank, place in found[:MOST_NAMED]]
            more = " and more" if len(found) > MOST_NAMED else ""
            yield SCHEDULE_COVERS_ONCE.problem(
                f"{action} appears {len(found)} times, not once: {'; '.join(named)}{more}",
                set_by=cells.file_at(*found[1]),
            )


def _gaps(
    schedule: Schedule, actions: Iterable[Action], cells: ActionCells
) -> tuple[list[Problem], int]:
    """Return the first faults in the sets of actions of a (stage, microbatch), and how many more.

    A file may name microbatch 10**9; so what is missing is counted, and only the first are named.
    """
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    kinds: dict[tuple[int, int], set[ActionKind]] = {}
    for action in actions:
        if 0 <= action.stage < stages and 0 <= action.microbatch < microbatches:
            kinds.setdefault((action.stage, action.microbatch), set()).add(action.kind)
    whole = sum(not _cell_fault(stage, microbatch, kinds) for stage, microbatch in kinds)
    wrong = stages * microbatches - whole
    faults: list[Problem] = []
    for stage, microbatch in ((s, m) for s in range(stages) for m in range(microbatches)):
        if len(faults) == min(wrong, MOST_NAMED):
            break
        if text := _cell_fault(stage, microbatch, kinds):
            rank = schedule.rank_of(stage, microbatch)
            message = f"stage {stage}, microbatch {microbatch}: {text} (rank {rank})"
            faults.append(SCHEDULE_COVERS_ONCE.problem(message, set_by=cells.file_at(rank)))
    return faults, wrong - len(faults)


def _cell_fault(stage: int, microbatch: int, found: dict[tuple[int, int], set[ActionKind]]) -> str:
    """Return what is wrong with the set of actions of one cell, or nothing."""
    kinds = found.get((stage, microbatch), set())
    forward, fused = ActionKind.F in kinds, ActionKind.BW in kinds
    split = [kind for kind in (ActionKind.B, ActionKind.W) if kind in kinds]
    if not forward:
        return f"F{stage}.{microbatch} is missing"
    if fused and split:
        return f"BW appears with {' and '.join(split)}; a cell has one or the other"
    if not fused and not split:
        return "BW (or B and W) is missing"
    if not fused and len(split) == 1:
        return f"{ActionKind.W if ActionKind.B in kinds else ActionKind.B} is missing"
    return ""
