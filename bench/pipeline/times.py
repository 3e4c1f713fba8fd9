"""What a pipeline did in a turn: times of actions, spans of steps, where a rank's time went.

Read from the events that `bench/pipeline/case.py` writes; all ranks are on one clock. A *span* is
a step from the start of its first action to the end of its last one, over all ranks.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from echelon.core.event import Event
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.simulate import Durations, simulate

_KINDS = frozenset(kind.value for kind in ActionKind)

Kind = tuple[ActionKind, int]
"""A kind of action on a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Hold the actions that all ranks ran in one step, and when each rank began and ended it."""

    actions: Mapping[Action, Event]
    begins: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def start_s(self) -> float:
        """Return when the first action started."""
        return min(event.start for event in self.actions.values())

    @property
    def span_s(self) -> float:
        """Return the seconds from the start of the first action to the end of the last."""
        return max(event.end for event in self.actions.values()) - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Hold the timed steps of one turn, and the seconds of a message (timed on its own)."""

    steps: tuple[Step, ...]
    transfer_s: float

    @property
    def span_s(self) -> float:
        """Return the median span of the steps."""
        return statistics.median(step.span_s for step in self.steps)


def read_turn(folder: Path, *, num_ranks: int, steps: int) -> Turn:
    """Return the last `steps` steps of the turn that the ranks wrote into `folder` last."""
    files = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    found: list[Step] = []
    for parts in zip(*(file["steps"][-steps:] for file in files), strict=True):
        assert len({part["number"] for part in parts}) == 1, "ranks wrote different steps"
        events = [Event(**event) for part in parts for event in part["events"]]
        found.append(
            Step(
                actions={Action.parse(one.name): one for one in events if one.kind in _KINDS},
                begins=tuple(part["begin"] for part in parts),
                ends=tuple(part["end"] for part in parts),
            )
        )
    return Turn(steps=tuple(found), transfer_s=max(file["transfer_s"] for file in files))


def action_times(steps: Sequence[Step]) -> dict[Kind, float]:
    """Return the median seconds of each kind of action on each stage."""
    taken: dict[Kind, list[float]] = {}
    for step in steps:
        for action, event in step.actions.items():
            taken.setdefault((action.kind, action.stage), []).append(event.end - event.start)
    return {kind: statistics.median(seconds) for kind, seconds in sorted(taken.items())}


def durations(times: Mapping[Kind, float], transfer_s: float) -> Durations:
    """Return measured times as the simulator takes them.

    A kind that was not run follows from those that were: a whole backward pass is B and W, and
    each of them half of it.
    """
    count = 1 + max(stage for _, stage in times)

    def of(kind: ActionKind, stage: int) -> float:
        if (kind, stage) in times:
            return times[kind, stage]
        if kind is ActionKind.BW:
            return of(ActionKind.B, stage) + of(ActionKind.W, stage)
        return times[ActionKind.BW, stage] / 2

    stages = range(count)
    return Durations(
        forward_s=tuple(of(ActionKind.F, stage) for stage in stages),
        backward_s=tuple(of(ActionKind.BW, stage) for stage in stages),
        input_gradient_s=tuple(of(ActionKind.B, stage) for stage in stages),
        weight_gradient_s=tuple(of(ActionKind.W, stage) for stage in stages),
        transfer_s=(transfer_s,) * (count - 1),
    )


def simulated_s(schedule: Schedule, turn: Turn) -> float:
    """Return the span that the simulator says, fed with the action times of a turn."""
    fed = durations(action_times(turn.steps), turn.transfer_s)
    return simulate(schedule, fed).makespan_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _EachAction(Durations):
    """Give every action of one step the seconds that it took."""

    taken_s: Mapping[Action, float]

    def seconds_of(self, action: Action) -> float:
        """Return the seconds of one action."""
        return self.taken_s[action]


def replayed_s(schedule: Schedule, turn: Turn) -> float:
    """Return the median span of the steps of a turn with the very times of all their actions.

    What a step took beyond that is neither compute nor the order of it.
    """
    fed = durations(action_times(turn.steps), turn.transfer_s)
    names = [one.name for one in fields(fed)]
    spans: list[float] = []
    for step in turn.steps:
        taken = {action: event.end - event.start for action, event in step.actions.items()}
        each = _EachAction(**{name: getattr(fed, name) for name in names}, taken_s=taken)
        spans.append(simulate(schedule, each).makespan_s)
    return statistics.median(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Hold a gap before an action for which all was there."""

    before: Action
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Say where the seconds of one rank in one step went.

    `busy_s` is time inside of actions, by kind. Of the gaps between them, `bubble_s` is time in
    which what the next action needs did not exist, `message_s` from its existence on the other
    rank to the start of the action, `gaps` those in which all was there. `outside_s` is the step
    before the first action and after the last one of any rank.
    """

    busy_s: Mapping[ActionKind, float]
    bubble_s: float
    message_s: float
    gaps: tuple[Gap, ...]
    outside_s: float

    @property
    def executor_s(self) -> float:
        """Return the seconds of all gaps in which all was there."""
        return sum(gap.seconds for gap in self.gaps)


def shares(schedule: Schedule, step: Step, rank: int, transfer_s: float) -> Shares:
    """Return where the time of `rank` went in one step; a message alone takes `transfer_s`."""
    busy: dict[ActionKind, float] = {}
    bubble = message = 0.0
    gaps: list[Gap] = []
    now = step.start_s
    for action in schedule.actions[rank]:
        event = step.actions[action]
        busy[action.kind] = busy.get(action.kind, 0.0) + event.end - event.start
        ready = _ready_s(schedule, step, action, rank)
        if ready is not None and ready + transfer_s > now:
            bubble += max(0.0, ready - now)
            message += event.start - max(now, ready)
        else:
            gaps.append(Gap(before=action, seconds=event.start - now))
        now = event.end
    end = step.start_s + step.span_s
    outside = (step.start_s - step.begins[rank]) + (step.ends[rank] - end)
    return Shares(
        busy_s=busy,
        bubble_s=bubble + end - now,
        message_s=message,
        gaps=tuple(gaps),
        outside_s=outside,
    )


def _ready_s(schedule: Schedule, step: Step, action: Action, rank: int) -> float | None:
    """Return when another rank had made what `action` needs; None where no rank had to."""
    if action.kind is ActionKind.W:
        return None
    source = action.stage + (-1 if action.kind is ActionKind.F else 1)
    if source not in range(schedule.num_stages):
        return None
    if schedule.rank_of(source, action.microbatch) == rank:
        return None
    if action.kind is ActionKind.F:
        return step.actions[replace(action, stage=source)].end
    kinds = (ActionKind.B, ActionKind.BW)
    made = (Action(kind, source, action.microbatch) for kind in kinds)
    return next(step.actions[one].end for one in made if one in step.actions)
