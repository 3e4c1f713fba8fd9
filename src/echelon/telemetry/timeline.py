# SPDX-License-Identifier: Apache-2.0
"""One step of a pipeline as a timeline: planned by the simulator, measured by the ranks.

Both are events of the same names on the same ranks, on one clock that starts with the first action.
What the ranks did in the step before its first action (read the batch) and after its gradients
were complete (agree on the loss, update the parameters) is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, takewhile
from statistics import median

from echelon.core.axis import Axis
from echelon.core.event import BESIDE_MESSAGES, Event
from echelon.core.plan import Plan
from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import Message, ScheduleMessages
from echelon.schedule.simulate import Durations, simulate
from echelon.telemetry.clock_alignment import (
    STEP_GATHER,
    ClockOffsets,
    PipelineTraffic,
    align_clocks,
)
from echelon.telemetry.recorded_steps import ACTION_KINDS, RecordedStep

SEND = "send"
GRADIENT_SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""The collectives that complete gradients: over data ranks, and over ranks of a pipeline that hold
the same parameters, both ends of a tied model or the copies of mirrored stages."""
_NOT_OF_DATA = (Axis.TP.value, Axis.CP.value)

MOST_RANKS = 64
"""Ranks that are drawn and traced: as many whole pipelines as fit, and at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPipeline:
    """Name one pipeline of a run: its schedule, and its global ranks in the order of `pp`."""

    schedule: Schedule
    ranks: tuple[int, ...]

    @property
    def traffic(self) -> PipelineTraffic:
        """Return the actions of each rank, with what it sends and receives."""
        return ScheduleMessages.from_schedule(self.schedule).steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Hold the actions and messages of one pipeline in one step.

    `events` carry global ranks and seconds since the first action of the step on any pipeline.
    `others` are the collectives of other axes that ranks ran in between, and the attention that
    transfers of context ranks hide behind, as far as they were recorded. `gradients_s` is when all
    gradients of this pipeline's ranks were complete.
    """

    pipeline: RunPipeline
    events: tuple[Event, ...]
    gradients_s: float
    others: tuple[Event, ...] = ()

    @property
    def actions(self) -> tuple[Event, ...]:
        """Return what was computed, by start time."""
        return tuple(event for event in self.events if event.kind in ACTION_KINDS)

    @property
    def span_s(self) -> float:
        """Return the seconds from the first start to the last end of an action."""
        actions = self.actions
        return max(event.end for event in actions) - min(event.start for event in actions)


def pipelines_from_plan(plan: Plan, *, most_ranks: int = MOST_RANKS) -> tuple[RunPipeline, ...]:
    """Return the first pipelines of a plan, `most_ranks` ranks in all but at least one pipeline."""
    schedule, groups = schedule_from_plan(plan), plan.mesh.groups(Axis.PP)
    shown = groups[: max(1, most_ranks // plan.mesh.pp)]
    return tuple(RunPipeline(schedule=schedule, ranks=ranks) for ranks in shown)


def planned_timelines(pipes: Sequence[RunPipeline], durations: Durations) -> tuple[Timeline, ...]:
    """Return the step of each pipeline as the simulator times it: the same on all of them."""
    found = simulate(pipes[0].schedule, durations)
    return tuple(
        Timeline(
            pipeline=pipe,
            events=tuple(replace(event, rank=pipe.ranks[event.rank]) for event in found.events),
            gradients_s=found.makespan_s,
        )
        for pipe in pipes
    )


def clock_offsets_from_steps(
    pipes: Sequence[RunPipeline], steps: Sequence[RecordedStep]
) -> ClockOffsets:
    """Return the clocks of the ranks of `pipes`, from steps that one start took in a row."""
    return align_clocks(steps, [pipe.ranks for pipe in pipes], pipes[0].traffic)


def measured_timelines(
    pipes: Sequence[RunPipeline], step: RecordedStep, clocks: ClockOffsets
) -> tuple[Timeline, ...]:
    """Return the step of each pipeline as its ranks recorded it.

    A message ends where it is known to have arrived: when its sender saw it off or its receiver
    used it, whichever came first.
    """
    begin = min(
        event.start + clocks.offset_s[rank]
        for rank, events in step.events.items()
        for event in events
        if event.kind in ACTION_KINDS
    )
    aligned = {
        rank: [shifted(event, clocks.offset_s[rank] - begin) for event in events]
        for rank, events in step.events.items()
    }
    return tuple(_measured(pipe, aligned) for pipe in pipes)


def is_whole(pipe: RunPipeline, step: RecordedStep) -> bool:
    """Return whether each rank ran the actions of its list, all of them and in this order."""
    for rank, row in zip(pipe.ranks, pipe.schedule.actions, strict=True):
        ran = [event for event in step.events[rank] if event.kind in ACTION_KINDS]
        named = [(event.name, event.kind, event.stage, event.microbatch) for event in ran]
        if named != [(str(one), one.kind.value, one.stage, one.microbatch) for one in row]:
            return False
    return True


def measured_durations(timelines: Sequence[Timeline]) -> Durations:
    """Return the median seconds of each kind of action on each stage, and of each transfer.

    A transfer is timed where it was waited for: from when the message was posted to the start of
    the action that used it. Where none was, it cost nothing.
    """
    schedule = timelines[0].pipeline.schedule
    seconds: dict[tuple[str, int | None], list[float]] = {}
    for event in (event for timeline in timelines for event in timeline.actions):
        seconds.setdefault((event.kind, event.stage), []).append(event.end - event.start)

    def of(kind: ActionKind) -> tuple[float, ...]:
        stages = range(schedule.num_stages)
        return tuple(median(seconds.get((kind.value, stage), [0.0])) for stage in stages)

    waits: dict[int, list[float]] = {}
    for timeline in timelines:
        for message, waited in _waited_for(timeline):
            boundary = min(message.source_stage, message.target_stage)
            waits.setdefault(boundary, []).append(waited)
    boundaries = range(schedule.num_stages - 1)
    sends = [event.bytes for timeline in timelines for event in timeline.events if event.bytes]
    return Durations(
        forward_s=of(ActionKind.F),
        backward_s=of(ActionKind.BW),
        input_gradient_s=of(ActionKind.B),
        weight_gradient_s=of(ActionKind.W),
        transfer_s=tuple(median(waits.get(boundary, [0.0])) for boundary in boundaries),
        message_bytes=max(sends, default=0),
    )


def posted_at(timeline: Timeline) -> dict[Message, float]:
    """Return when each message left the action that made it: at its end, or before that.

    A whole backward pass has its message ready before it computes weight gradients.
    """
    ends = {event.name: event.end for event in timeline.actions}
    starts = {event.name: event.start for event in timeline.events if event.kind == SEND}
    return {
        step.send: min(ends[str(step.action)], starts.get(str(step.send), float("inf")))
        for step in chain.from_iterable(timeline.pipeline.traffic)
        if step.send is not None
    }


def _waited_for(timeline: Timeline) -> list[tuple[Message, float]]:
    """Return the messages that were still to be made when their user was ready, and their time."""
    at = {event.name: event for event in timeline.actions}
    posted = posted_at(timeline)
    found: list[tuple[Message, float]] = []
    for before, step in chain.from_iterable(map(pairwise, timeline.pipeline.traffic)):
        if step.receive is None:
            continue
        sent, start = posted[step.receive], at[str(step.action)].start
        if sent >= at[str(before.action)].end:
            found.append((step.receive, max(0.0, start - sent)))
    return found


def shifted(event: Event, seconds: float) -> Event:
    """Return an event on a clock that reads so much more."""
    return replace(event, start=event.start + seconds, end=event.end + seconds)


def _measured(pipe: RunPipeline, events: Mapping[int, Sequence[Event]]) -> Timeline:
    used: dict[str, float] = {}
    for rank, row in zip(pipe.ranks, pipe.traffic, strict=True):
        starts = {event.name: event.start for event in events[rank]}
        used |= {str(s.receive): starts[str(s.action)] for s in row if s.receive is not None}
    drawn: list[Event] = []
    others: list[Event] = []
    gradients_s = 0.0
    for rank in pipe.ranks:
        last = max(event.end for event in events[rank] if event.kind in ACTION_KINDS)
        gradients_s = max(gradients_s, last)
        # What follows the exchange by which all ranks agree on the step is no part of it.
        for event in takewhile(lambda one: (one.kind, one.axis) != STEP_GATHER, events[rank]):
            if event.kind in ACTION_KINDS:
                drawn.append(event)
            elif event.kind == SEND and event.name in used:
                drawn.append(replace(event, end=max(event.start, min(event.end, used[event.name]))))
            elif event.kind in GRADIENT_SUMS and event.axis not in _NOT_OF_DATA:
                gradients_s = max(gradients_s, event.end)
            beside = event.kind in BESIDE_MESSAGES or event.axis not in ("", Axis.PP.value)
            if beside and event.end > 0:
                others.append(replace(event, start=max(0.0, event.start)))
    drawn.sort(key=lambda event: (event.start, event.end, event.rank))
    return Timeline(
        pipeline=pipe, events=tuple(drawn), gradients_s=gradients_s, others=tuple(others)
    )
