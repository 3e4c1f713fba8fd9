# SPDX-License-Identifier: Apache-2.0
"""What binds a run: compute, memory, communication, data, or the bubble of its pipeline.

A step of a rank is cut into the five from what the rank wrote down, so that they add up to it:

- *data*: what it took to load the batch, as far as no action ran meanwhile.
- *communication*: exposed waits for collectives (`Event.waited_s`), and of the waits for messages
  of a pipeline what sending takes: from when a message was posted to when it was there.
- *bubble*: what a rank waited for a message before it was posted, for a send whose receiver was
  late, and, after its last action, for ranks of its pipeline that still had some.
- *memory*: the update of the parameters, which reads and writes all states once and does a few
  FLOPs for each byte; and the operators of blocks that are below the ridge of the roofline, for as
  long as their bytes take on the plan's device (`cost/seconds/unit_times.py`).
- *compute*: the rest, products above all.

A rank that waits for a late one sends nothing meanwhile. What it waits in a collective beyond the
rank that comes last, and so waits least, goes to what that rank does longer in the step than this
one: so a slow disk of one host is data, not communication.
The seconds are means over ranks, and medians over the last steps. The largest binds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median

from echelon.core.axis import Axis
from echelon.core.errors import ConfigError
from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.core.rulebook.run import RUN_HAS_EVENTS, STEP_RECORDED
from echelon.cost.seconds.unit_times import memory_bound_seconds
from echelon.schedule.action import ActionKind
from echelon.telemetry.recorded_steps import ACTION_KINDS, LOAD, RecordedStep
from echelon.telemetry.schedule_report import read_last_steps
from echelon.telemetry.timeline import (
    GRADIENT_SUMS,
    SEND,
    STEP_GATHER,
    ClockOffsets,
    RunPipeline,
    clock_offsets_from_steps,
    first_start,
    measured_durations,
    measured_timelines,
    pipelines_from_plan,
    posted_at,
)

UPDATE = "update"
_INSIDE = (Axis.TP.value, Axis.CP.value)
"""Axes whose collectives are inside of actions: none of them follows the last one."""


class Bound(StrEnum):
    """Name what a step spends its time on."""

    COMPUTE = "compute"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    DATA = "data"
    BUBBLE = "bubble"


_OWN = (Bound.COMPUTE, Bound.MEMORY, Bound.DATA)
"""What a rank does by itself, and makes others wait with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Say what binds the steps of a run."""

    steps: tuple[int, ...]
    """The steps that were looked at."""
    seconds: Mapping[Bound, float]
    """Seconds of a rank in a step, by what they went to."""
    waits_s: Mapping[str, float]
    """Seconds of exposed waits of a rank in a step by axis, for whatever reason."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def binds(self) -> Bound:
        """Return what takes most of a step."""
        return max(self.seconds, key=lambda one: self.seconds[one])

    @property
    def second(self) -> Bound:
        """Return what takes most after that."""
        return max(set(Bound) - {self.binds}, key=lambda one: self.seconds[one])

    @property
    def margin_s(self) -> float:
        """Return the seconds by which what binds is ahead of the second."""
        return self.seconds[self.binds] - self.seconds[self.second]

    def share(self, seconds: float) -> float:
        """Return the share of a step."""
        return seconds / self.step_s if self.step_s else 0.0


def read_bound(run_dir: Path, plan: Plan) -> StepBound | None:
    """Return what binds the last steps of a run; None where no step was recorded whole.

    Runs of earlier versions did not record waits. ConfigError where a line cannot be read.
    """
    pipes = pipelines_from_plan(plan)
    try:
        steps, _ = read_last_steps(run_dir, plan, pipes)
    except ConfigError as error:
        if {one.rule for one in error.problems} <= {RUN_HAS_EVENTS.id, STEP_RECORDED.id}:
            return None
        raise
    events = [one for step in steps for events in step.events.values() for one in events]
    if plan.mesh.world_size > 1 and not any(event.waited_s for event in events):
        return None
    clocks = clock_offsets_from_steps(pipes, steps)
    floors_s = memory_bound_seconds(plan)
    found = [
        _means(_ranks_of_step(pipes, step, clocks, floors_s), _waits_for_late_ranks(pipes, step))
        for step in steps
    ]
    waits = [_waits_by_axis(step) for step in steps]
    return StepBound(
        steps=tuple(step.number for step in steps),
        seconds={one: median(step[one] for step in found) for one in Bound},
        waits_s={
            axis: median(step.get(axis, 0.0) for step in waits)
            for axis in sorted({axis for step in waits for axis in step})
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankStep:
    """Hold what a rank recorded of a step, and what it waited for, on its own clock.

    `posted` is when the message was posted that the action of a name needs; `sending_s` is what it
    takes to send a message, by name. `last` is when the last action of its pipeline ended.
    """

    events: Sequence[Event]
    posted: Mapping[str, float]
    sending_s: Mapping[str, float]
    last: float

    def seconds(self, floor_s: float) -> dict[Bound, float]:
        """Return what the step went to; memory sets the pace for `floor_s` of its actions."""
        updates = [event for event in self.events if event.kind == UPDATE]
        sent = bubble = after = in_updates = 0.0
        for event in self.events:
            if event.kind in ACTION_KINDS:
                early = self._before_it_was_posted(event)
                bubble, sent = bubble + early, sent + event.waited_s - early
            elif event.kind == SEND:
                taking = min(event.waited_s, self.sending_s.get(event.name, 0.0))
                bubble, sent = bubble + event.waited_s - taking, sent + taking
            else:
                sent += event.waited_s
                if any(one.start <= event.start and event.end <= one.end for one in updates):
                    in_updates += event.waited_s
                if _ends_a_step(event):
                    after += event.waited_s
        last = max((one.end for one in self.events if one.kind in ACTION_KINDS), default=self.last)
        drained = min(after, max(0.0, self.last - last))
        sent, bubble = sent - drained, bubble + drained
        update = sum(one.end - one.start for one in updates) - in_updates
        data = self._loading()
        timed = [event for event in self.events if event.kind != LOAD]
        whole = data + max(one.end for one in timed) - min(map(_begin, timed))
        rest = max(0.0, whole - sent - bubble - update - data)
        return {
            Bound.COMPUTE: rest - min(rest, floor_s),
            Bound.MEMORY: max(0.0, update) + min(rest, floor_s),
            Bound.COMMUNICATION: sent,
            Bound.DATA: data,
            Bound.BUBBLE: bubble,
        }

    def _before_it_was_posted(self, action: Event) -> float:
        """Return for how long an action waited for a message that nobody had sent yet."""
        if action.name not in self.posted:
            return 0.0
        return min(action.waited_s, max(0.0, self.posted[action.name] - _begin(action)))

    def _loading(self) -> float:
        """Return for how long the batch was loaded while no action ran."""
        actions = [event for event in self.events if event.kind in ACTION_KINDS]
        begin = min((event.start for event in actions), default=0.0)
        end = max((event.end for event in actions), default=0.0)
        return sum(
            load.end - load.start - max(0.0, min(load.end, end) - max(load.start, begin))
            for load in self.events
            if load.kind == LOAD
        )


def _begin(event: Event) -> float:
    """Return when a rank came to an event: a wait for the message of an action lies before it."""
    return event.start - (event.waited_s if event.kind in ACTION_KINDS else 0.0)


def _ends_a_step(event: Event) -> bool:
    """Return whether a rank comes to a collective when its actions are over."""
    sums = event.kind in GRADIENT_SUMS and event.axis not in _INSIDE
    return sums or (event.kind, event.axis) == STEP_GATHER


def _ranks_of_step(
    pipes: Sequence[RunPipeline],
    step: RecordedStep,
    clocks: ClockOffsets,
    floors_s: Sequence[float],
) -> Mapping[int, Mapping[Bound, float]]:
    """Return what the step of each rank went to; `floors_s` are of a microbatch on each stage."""
    begin = first_start(step, clocks)
    ranks: dict[int, Mapping[Bound, float]] = {}
    for timeline in measured_timelines(pipes, step, clocks):
        posted, pipe = posted_at(timeline), timeline.pipeline
        transfer_s = measured_durations([timeline]).transfer_s
        last = max(event.end for event in timeline.actions)
        for rank, row in zip(pipe.ranks, pipe.traffic, strict=True):
            shift = begin - clocks.offset_s[rank]
            one = _RankStep(
                events=step.events[rank],
                posted={
                    str(at.action): posted[at.receive] + shift
                    for at in row
                    if at.receive is not None
                },
                sending_s={
                    str(at.send): transfer_s[min(at.send.source_stage, at.send.target_stage)]
                    for at in row
                    if at.send is not None
                },
                last=last + shift,
            )
            forward = [at.action.stage for at in row if at.action.kind is ActionKind.F]
            ranks[rank] = one.seconds(sum(floors_s[stage] for stage in forward))
    return ranks


def _waits_for_late_ranks(
    pipes: Sequence[RunPipeline], step: RecordedStep
) -> Mapping[tuple[int, int], float]:
    """Return how long a rank (the first) waited in collectives only because another was late.

    Ranks are compared with those at their place in other pipelines, and all of them where the
    world takes part: they call the same collectives, one after the other.
    """
    met: dict[tuple[object, ...], dict[int, float]] = {}
    for pipe in pipes:
        for place, rank in enumerate(pipe.ranks):
            counts: dict[tuple[object, ...], int] = {}
            for event in step.events[rank]:
                if not event.axis or event.kind == SEND:
                    continue
                call = (event.kind, event.axis, event.name)
                counts[call] = counts.get(call, 0) + 1
                who = None if (event.kind, event.axis) == STEP_GATHER else place
                met.setdefault((*call, counts[call], who), {})[rank] = event.waited_s
    found: dict[tuple[int, int], float] = {}
    for waits in met.values():
        late = min(waits, key=lambda rank: waits[rank])
        for rank, waited in waits.items():
            found[rank, late] = found.get((rank, late), 0.0) + waited - waits[late]
    return found


def _means(
    ranks: Mapping[int, Mapping[Bound, float]], waits: Mapping[tuple[int, int], float]
) -> Mapping[Bound, float]:
    """Return the means over ranks; what one waits for a late rank goes to what makes that late."""
    settled = {rank: dict(spent) for rank, spent in ranks.items()}
    for (rank, late), waited in waits.items():
        longer = {one: max(0.0, ranks[late][one] - ranks[rank][one]) for one in _OWN}
        total = sum(longer.values())
        moved = min(waited, total, settled[rank][Bound.COMMUNICATION])
        settled[rank][Bound.COMMUNICATION] -= moved
        for one, seconds in longer.items():
            settled[rank][one] += moved * seconds / total if total else 0.0
    return {one: fmean(rank[one] for rank in settled.values()) for one in Bound}


def _waits_by_axis(step: RecordedStep) -> Mapping[str, float]:
    """Return the exposed waits of a rank by axis, the mean over ranks."""
    found: dict[str, float] = {}
    for event in (one for events in step.events.values() for one in events if one.waited_s):
        axis = Axis.PP.value if event.kind in ACTION_KINDS else event.axis
        found[axis] = found.get(axis, 0.0) + event.waited_s / len(step.events)
    return found
