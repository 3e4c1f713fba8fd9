"""What a pipeline did in a turn: times of actions, and spans of steps.

Read from the events that `bench/pipeline/case.py` writes; all ranks are on one clock. A *span* is
a step from the start of its first action to the end of its last one, over all ranks.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.core.event import Event
from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.simulate import Durations, simulate

_KINDS = frozenset(kind.value for kind in ActionKind)

Kind = tuple[ActionKind, int]
"""A kind of action on a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Hold the actions that all ranks ran in one step."""

    actions: Mapping[Action, Event]

    @property
    def span_s(self) -> float:
        """Return the seconds from the start of the first action to the end of the last."""
        return max(event.end for event in self.actions.values()) - min(
            event.start for event in self.actions.values()
        )


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
            Step(actions={Action.parse(one.name): one for one in events if one.kind in _KINDS})
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
