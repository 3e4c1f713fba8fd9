# SPDX-License-Identifier: Apache-2.0
"""Put the clocks of ranks on one: a message cannot be used before it was sent.

Each rank counts seconds since its own start, so its times mean nothing beside those of another one.
What is known of two clocks comes from what happened between them. With o the offset to add:

    a message   posted at s on rank a, used at u on rank b         s + o_a <= u + o_b
    a gather    begun at s on rank a, left at e on rank b        s + o_a <= e + o_b

The tightest of these bounds, also through third ranks, leave an interval for each offset to the
first rank, of which the middle is taken. The middles together keep every bound: with d(r,s) the
most by which o_s can be above o_r, o_r = (d(0,r) - d(r,0)) / 2, so that o_s - o_r is half of
d(0,s) - d(0,r), at most d(r,s), and half of d(r,0) - d(s,0), at most that too. Half of the widest
interval is what is not known. Clocks of two hosts drift, so only what lies close in time is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from echelon.core.event import Event
from echelon.schedule.messages import ActionWithMessages, Message
from echelon.telemetry.recorded_steps import ACTION_KINDS, RecordedStep

STEP_GATHER = ("all_gather", "world")
"""The kind and the axis of the exchange by which all ranks end a step."""

Bounds = dict[tuple[int, int], float]
"""`bounds[a, b]`: the most by which the offset of a can be above that of b."""

PipelineTraffic = Sequence[Sequence[ActionWithMessages]]
"""The actions of each rank of a pipeline in a step, with what it sends and receives."""

NO_DRIFT_S = 10.0
"""For how long clocks are taken to run alike: at 20 us/s of drift, they are then 0.2 ms apart."""

_NOT_JOINED = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffsets:
    """Give the seconds to add to the times of each rank; `uncertainty_s` is half of the slack."""

    offset_s: Mapping[int, float]
    uncertainty_s: float


def align_clocks(
    steps: Sequence[RecordedStep], pipes: Sequence[Sequence[int]], traffic: PipelineTraffic
) -> ClockOffsets:
    """Return the clocks of the ranks at the last of `steps`, all of one start of the run.

    `pipes` are the global ranks of each pipeline, `traffic` is what each rank of one does in a
    step.
    """
    bounds: Bounds = {}
    latest = _begin_of(steps[-1])
    for step in (step for step in steps if latest - _begin_of(step) <= NO_DRIFT_S):
        for ranks in pipes:
            _bound_by_messages(bounds, step.events, ranks, traffic)
        _bound_by_gather(bounds, step.events)
    ranks = sorted(steps[0].events)
    above = _distances(bounds, ranks)
    below = _distances({(b, a): slack for (a, b), slack in bounds.items()}, ranks)
    slack = {rank: above[rank] + below[rank] for rank in ranks}
    return ClockOffsets(
        offset_s={r: (above[r] - below[r]) / 2 if slack[r] < _NOT_JOINED else 0.0 for r in ranks},
        uncertainty_s=max(abs(one) / 2 for one in slack.values()),
    )


def _begin_of(step: RecordedStep) -> float:
    return step.events[min(step.events)][0].start


def _bound_by_messages(
    bounds: Bounds,
    events: Mapping[int, Sequence[Event]],
    ranks: Sequence[int],
    traffic: PipelineTraffic,
) -> None:
    posted: dict[Message, float] = {}
    used: dict[Message, float] = {}
    for rank, row in zip(ranks, traffic, strict=True):
        actions = {event.name: event for event in events[rank] if event.kind in ACTION_KINDS}
        sends = {event.name: event.start for event in events[rank] if event.kind == "send"}
        for step in row:
            event = actions.get(str(step.action))
            if event is not None and step.send is not None:
                posted[step.send] = sends.get(str(step.send), event.start)
            if event is not None and step.receive is not None:
                used[step.receive] = event.start
    for message in posted.keys() & used.keys():
        source, target = ranks[message.source_rank], ranks[message.target_rank]
        _tighten(bounds, source, target, used[message] - posted[message])


def _bound_by_gather(bounds: Bounds, events: Mapping[int, Sequence[Event]]) -> None:
    every = ((rank, event) for rank, of_rank in events.items() for event in of_rank)
    gathers = {rank: event for rank, event in every if (event.kind, event.axis) == STEP_GATHER}
    for source, target in permutations(gathers, 2):
        _tighten(bounds, source, target, gathers[target].end - gathers[source].start)


def _tighten(bounds: Bounds, a: int, b: int, slack: float) -> None:
    bounds[a, b] = min(slack, bounds.get((a, b), _NOT_JOINED))


def _distances(bounds: Bounds, ranks: Sequence[int]) -> dict[int, float]:
    """Return the most that the offset of each rank can be above that of the first one.

    Bellman and Ford's shortest paths; bounds that contradict each other end with the last round.
    """
    found = dict.fromkeys(ranks, _NOT_JOINED)
    found[ranks[0]] = 0.0
    for _ in ranks:
        changed = False
        for (a, b), slack in bounds.items():
            if a != ranks[0] and found[b] + slack < found[a]:
                found[a] = found[b] + slack
                changed = True
        if not changed:
            break
    return found
