"""What one rank runs of a schedule, looked up once: messages, order, and what the last W ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.deadlock import send_window
from echelon.schedule.dependencies import run_lists
from echelon.schedule.messages import Message, Step, Traffic

_SENDS_SPARE = 2
"""Sends per link that may be pending beyond those that the schedule needs, to keep it busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """What one rank runs of a schedule: its actions, the receives before each, how sends wait.

    `last` is the place of the last action of each stage that gives weight gradients. `turns` are
    the places of the actions in an order in which all ranks' actions can run, one after the other.
    """

    schedule: Schedule
    steps: Sequence[Step]
    posts: Sequence[Sequence[Message]]
    last: Mapping[int, int]
    window: int
    turns: Sequence[int]

    @classmethod
    def of(cls, schedule: Schedule, pp_rank: int) -> RankRow:
        """Return the row of pipeline rank `pp_rank`."""
        traffic = Traffic.of(schedule)
        steps = traffic.steps[pp_rank]
        place = {action: turn for turn, action in enumerate(run_lists(schedule).order)}
        return cls(
            schedule=schedule,
            steps=steps,
            posts=traffic.receives[pp_rank],
            last=_last_gradients(steps),
            window=send_window(traffic) + _SENDS_SPARE,
            # Apart by two: a rank that waits for its input comes before one that has begun.
            turns=[2 * place.get(step.action, len(place)) for step in steps],
        )


def _last_gradients(steps: Sequence[Step]) -> dict[int, int]:
    """Return the place of the last action of each stage that gives weight gradients."""
    kinds = (ActionKind.BW, ActionKind.W)
    return {step.action.stage: i for i, step in enumerate(steps) if step.action.kind in kinds}
