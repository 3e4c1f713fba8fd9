# SPDX-License-Identifier: Apache-2.0
"""Why ranks were idle: the bubble of one pipeline in one step, by cause.

The step of a pipeline is a window from the first start of an action on any of its ranks to when all
gradients of its ranks are complete. What a rank does not compute in it is idle, and each second of
that has one cause:

    |<------------------------------ window ------------------------------>|
    |  fill  |F0|F1| waits  | transfer |B0|F2|-|B1| ... |BW7|  drain  |tail|
             first  for the    for the       between      last       last  gradients
             action maker    message       actions    of this rank  of all  complete

- *fill*: before the rank's first action.
- *schedule* and *imbalance*: before an action that needs a message, until the action that makes it
  has posted it. The order of the schedule makes ranks wait in this way even if all stages are
  equal and transfers are free; as much as they wait then (each action taking the mean of its kind
  over all ranks) is *schedule*. What they wait beyond that where each action takes its own time
  and transfers are free is *imbalance*: some stage, or some microbatch, takes longer than the mean.
- *transfer*: before such an action, from when the message is posted to the start of the action; and
  what is left of the wait for its maker, which was late because it had waited for messages itself.
  In a measured step that includes handing messages over, and time between actions elsewhere.
- *between actions*: before an action that needs no message: what the program itself takes, and
  sends that it waits for. The simulator has none.
- *drain*: after the rank's last action, until the last action of all ranks.
- *data-parallel tail*: from the last action of all ranks until the gradients are complete: sums
  over data ranks, over the two ends of a tied embedding, or over the copies of mirrored stages,
  that nothing hid. Nothing in a planned step, which is simulated without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from statistics import fmean

from echelon.schedule.action import Action, Schedule
from echelon.schedule.messages import required_results, result_name, run_action_lists
from echelon.telemetry.timeline import Timeline, posted_at


class IdleCause(StrEnum):
    """Name why a rank was idle."""

    FILL = "fill"
    SCHEDULE = "schedule"
    IMBALANCE = "imbalance"
    TRANSFER = "transfer"
    BETWEEN = "between actions"
    DRAIN = "drain"
    TAIL = "data-parallel tail"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBubble:
    """Say what one (global) rank did in the window: the seconds it computed, and idled by cause."""

    rank: int
    busy_s: float
    idle_s: Mapping[IdleCause, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """Hold the bubble of each rank of one or several pipelines; `rank_s` is what all ranks had."""

    ranks: tuple[RankBubble, ...]
    rank_s: float

    @property
    def busy_s(self) -> float:
        """Return the seconds that all ranks together computed."""
        return sum(rank.busy_s for rank in self.ranks)

    def idle_s(self, cause: IdleCause) -> float:
        """Return the seconds that all ranks together idled for one cause."""
        return sum(rank.idle_s[cause] for rank in self.ranks)

    def fraction(self, cause: IdleCause) -> float:
        """Return the share of the time of all ranks that was idle for one cause."""
        return self.idle_s(cause) / self.rank_s if self.rank_s else 0.0

    @property
    def total_fraction(self) -> float:
        """Return the share of the time of all ranks that was idle."""
        return sum(self.fraction(cause) for cause in IdleCause)


def bubble_from_timelines(timelines: Iterable[Timeline]) -> Bubble:
    """Return the bubble of the ranks of some pipelines, each in the window of its own step."""
    found = [_bubble_of_pipe(timeline) for timeline in timelines]
    return Bubble(
        ranks=tuple(rank for bubble in found for rank in bubble.ranks),
        rank_s=sum(bubble.rank_s for bubble in found),
    )


def _bubble_of_pipe(timeline: Timeline) -> Bubble:
    schedule, actions = timeline.pipeline.schedule, timeline.actions
    begin = min(event.start for event in actions)
    last = max(event.end for event in actions)
    end = max(last, timeline.gradients_s)
    at = {event.name: event for event in actions}
    waits = _waits(timeline)
    paces = _paces(timeline)
    equal, free = (_replayed(schedule, one) for one in (_means(paces), paces))
    found: list[RankBubble] = []
    for place, rank in enumerate(timeline.pipeline.ranks):
        own = [at[str(action)] for action in schedule.actions[place]]
        maker_s, transfer_s, between_s = waits[place]
        by_schedule = min(maker_s, equal[place])
        by_stages = min(maker_s, max(free[place], by_schedule)) - by_schedule
        idle = dict.fromkeys(IdleCause, 0.0)
        idle[IdleCause.FILL] = own[0].start - begin if own else last - begin
        idle[IdleCause.SCHEDULE] = by_schedule
        idle[IdleCause.IMBALANCE] = by_stages
        idle[IdleCause.TRANSFER] = transfer_s + maker_s - by_schedule - by_stages
        idle[IdleCause.BETWEEN] = between_s
        idle[IdleCause.DRAIN] = last - own[-1].end if own else 0.0
        idle[IdleCause.TAIL] = end - last
        busy = sum(event.end - event.start for event in own)
        found.append(RankBubble(rank=rank, busy_s=busy, idle_s=idle))
    return Bubble(ranks=tuple(found), rank_s=(end - begin) * len(found))


def _waits(timeline: Timeline) -> list[tuple[float, float, float]]:
    """Return for each pipeline rank how long it waited between its first and last action.

    For the makers of messages, for the messages themselves, and for anything else.
    """
    at = {event.name: event for event in timeline.actions}
    posted = posted_at(timeline)
    found: list[tuple[float, float, float]] = []
    for row in timeline.pipeline.traffic:
        maker_s = transfer_s = between_s = 0.0
        for before, step in pairwise(row):
            free, start = at[str(before.action)].end, at[str(step.action)].start
            if step.receive is None:
                between_s += start - free
            else:
                # Clocks of ranks agree only so far; a part of a gap never leaves it.
                ready = min(max(posted[step.receive], free), start)
                maker_s += ready - free
                transfer_s += start - ready
        found.append((maker_s, transfer_s, between_s))
    return found


@dataclass(frozen=True, slots=True)
class _ActionPace:
    """Say how long one action takes, and after how much of that its message leaves."""

    kind: str
    seconds: float
    gives_s: float


def _paces(timeline: Timeline) -> Mapping[str, _ActionPace]:
    """Return the pace of each action, as it was in this step."""
    posted = posted_at(timeline)
    paces: dict[str, _ActionPace] = {}
    at = {event.name: event for event in timeline.actions}
    for step in chain.from_iterable(timeline.pipeline.traffic):
        event = at[str(step.action)]
        gives = event.end if step.send is None else posted[step.send]
        seconds = event.end - event.start
        paces[event.name] = _ActionPace(event.kind, seconds, gives - event.start)
    return paces


def _means(paces: Mapping[str, _ActionPace]) -> Mapping[str, _ActionPace]:
    """Return for each action the mean pace of its kind, over all ranks."""
    by_kind: dict[str, list[_ActionPace]] = {}
    for pace in paces.values():
        by_kind.setdefault(pace.kind, []).append(pace)
    means = {
        kind: _ActionPace(kind, fmean(p.seconds for p in same), fmean(p.gives_s for p in same))
        for kind, same in by_kind.items()
    }
    return {name: means[pace.kind] for name, pace in paces.items()}


def _replayed(schedule: Schedule, paces: Mapping[str, _ActionPace]) -> list[float]:
    """Return what each rank waits for makers at these paces, where transfers take nothing."""
    free = [0.0] * schedule.num_ranks
    made: dict[Action, float] = {}
    waits = [0.0] * schedule.num_ranks
    for action in run_action_lists(schedule)[0]:
        rank = schedule.rank_of(action.stage, action.microbatch)
        needs = required_results(action, schedule.num_stages)
        start = max(free[rank], *(made[need] for need in needs), 0.0)
        # Before its first action a rank does not wait for a maker: the pipeline fills.
        if action != schedule.actions[rank][0]:
            waits[rank] += start - free[rank]
        pace = paces[str(action)]
        free[rank] = start + pace.seconds
        made[result_name(action)] = start + pace.gives_s
    return waits
