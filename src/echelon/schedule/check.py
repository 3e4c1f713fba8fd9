"""Prove a schedule before any process starts, whoever wrote it.

What is proved, and under which conditions:

- *Complete*: every stage has F once and BW once, or B and W once each, for every microbatch, on
  the rank that owns the stage, and nothing else is in the lists.
- *Ordered*: an action stands after everything it needs that its own rank makes. What other ranks
  make arrives as messages, and is waited for.
- *No deadlock*, when every rank runs its list from left to right, waits before an action until the
  message that it needs has arrived, posts its sends without waiting for them, and posts its
  receives in the order in which the sender posts the sends (`Traffic.receives`), at the latest
  before the action that needs them. This holds whether a send is buffered or a rendezvous: take
  the order in which the actions run with buffered sends and place each transfer directly before
  the first action for which its receive is posted. Its sender is done by then, as it posts its
  sends in the same order; so nothing in a rendezvous waits for a later thing either.
- *What else a transport must grant* is reported, not assumed: the number of sends that a rank
  leaves pending (`send_window`), and whether both directions may share one queue
  (`shares_queue`).
- *Memory*: the most microbatches whose activations a stage, and a rank, hold at once, from the
  start of F to the end of BW or W.

Not proved: that every rank is alive, or that no other communication (tensor or data parallel)
waits inside an action for a rank that is somewhere else in its list.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from echelon.core.errors import InfeasiblePlan, Problem
from echelon.core.rulebook.schedule import (
    SCHEDULE_CANNOT_DEADLOCK,
    SCHEDULE_COVERS_ONCE,
    SCHEDULE_KEEPS_ORDER,
    SCHEDULE_PLACES_STAGES,
)
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.deadlock import send_window, shares_queue, stuck_cycle
from echelon.schedule.dependencies import needs_of, result_of
from echelon.schedule.messages import Traffic

_MOST_NAMED = 8


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


def check_schedule(schedule: Schedule) -> ScheduleReport:
    """Return what holds of `schedule`; InfeasiblePlan names every cell at which it is wrong.

    Faults that hide one another are looked for in turn: placement, then coverage, then order
    within a rank, then deadlock between ranks.
    """
    for find in (_placement, _coverage, _order, _deadlock):
        problems = find(schedule)
        if problems:
            raise InfeasiblePlan(problems)
    traffic = Traffic.of(schedule)
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


def _peak(actions: list[Action] | tuple[Action, ...]) -> int:
    """Count F as taking and BW or W as freeing; B alone frees nothing that W still reads."""
    held = peak = 0
    for action in actions:
        if action.kind is ActionKind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind in (ActionKind.BW, ActionKind.W):
            held -= 1
    return peak


def _placement(schedule: Schedule) -> list[Problem]:
    ranks = range(schedule.num_ranks)
    messages: list[str] = []
    if schedule.num_ranks < 1 or not schedule.stage_ranks or schedule.num_microbatches < 1:
        messages.append(
            f"{schedule.num_ranks} ranks, {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} microbatches; each must be at least 1"
        )
    if len(schedule.actions) != schedule.num_ranks:
        messages.append(f"{len(schedule.actions)} lists of actions for {schedule.num_ranks} ranks")
    for stage, rank in enumerate(schedule.stage_ranks):
        if rank not in ranks:
            messages.append(f"stage {stage} is on rank {rank}, but ranks are 0 to {ranks.stop - 1}")
    if wrong := sorted(set(schedule.mirrored) - set(range(schedule.num_microbatches))):
        messages.append(f"mirrored microbatches {wrong} do not exist")
    for rank in ranks:
        if not schedule.stages_of(rank):
            messages.append(f"rank {rank} owns no stage")
    return [SCHEDULE_PLACES_STAGES.problem(message) for message in _first(messages)]


def _coverage(schedule: Schedule) -> list[Problem]:
    messages: list[str] = []
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    count: Counter[Action] = Counter()
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            if action.stage not in stages or action.microbatch not in microbatches:
                messages.append(
                    f"rank {rank}, place {place}: {action} is outside of the {stages.stop} stages "
                    f"and {microbatches.stop} microbatches"
                )
            elif (owner := schedule.rank_of(action.stage, action.microbatch)) != rank:
                messages.append(
                    f"rank {rank}, place {place}: {action}, but stage {action.stage} is on rank "
                    f"{owner}"
                )
            count[action] += 1
    messages.extend(
        f"{action} stands {times} times, not once" for action, times in count.items() if times > 1
    )
    for stage in stages:
        for microbatch in microbatches:
            message = _cell(stage, microbatch, count)
            if message:
                messages.append(message)
    return [SCHEDULE_COVERS_ONCE.problem(message) for message in _first(messages)]


def _cell(stage: int, microbatch: int, count: Counter[Action]) -> str:
    """Return what is wrong with the set of actions of one cell, or nothing."""
    kinds = {kind for kind in ActionKind if count[Action(kind, stage, microbatch)]}
    forward, fused = ActionKind.F in kinds, ActionKind.BW in kinds
    halves = {ActionKind.B, ActionKind.W}
    split = kinds & halves
    at = f"stage {stage}, microbatch {microbatch}"
    if not forward:
        return f"{at}: F{stage}.{microbatch} is missing"
    if fused and split:
        return f"{at}: BW stands beside {' and '.join(sorted(split))}; a cell has one or the other"
    if not fused and split != halves:
        missing = (halves - split).pop() if split else "BW (or B and W)"
        return f"{at}: {missing} is missing"
    return ""


def _order(schedule: Schedule) -> list[Problem]:
    messages: list[str] = []
    for rank, row in enumerate(schedule.actions):
        places = {result_of(action): place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for need in needs_of(action, schedule.num_stages):
                made = places.get(need)
                if made is not None and made > place:
                    messages.append(
                        f"rank {rank}: {action} at place {place} needs {row[made]}, "
                        f"which stands at place {made}"
                    )
    return [SCHEDULE_KEEPS_ORDER.problem(message) for message in _first(messages)]


def _deadlock(schedule: Schedule) -> list[Problem]:
    circle = stuck_cycle(schedule)
    if not circle:
        return []
    waits = "; ".join(
        f"rank {wait.rank} cannot start {wait.action} before {wait.waits_for} on rank "
        f"{wait.on_rank}, which stands behind {circle[(i + 1) % len(circle)].action}"
        for i, wait in enumerate(circle)
    )
    return [SCHEDULE_CANNOT_DEADLOCK.problem(f"{len(circle)} ranks wait in a circle: {waits}")]


def _first(messages: list[str]) -> list[str]:
    """Keep the first few: one fault of a builder repeats for every microbatch."""
    if len(messages) <= _MOST_NAMED:
        return messages
    more = len(messages) - _MOST_NAMED
    return [*messages[:_MOST_NAMED], f"and {more} more of the same kind"]
