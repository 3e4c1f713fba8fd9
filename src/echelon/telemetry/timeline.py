# SPDX-License-Identifier: Apache-2.0
"""One step of a pipeline as a timeline: planned by the simulator, measured by the ranks.

Both are events of the same names on the same ranks, on one clock that starts with the first action.
What the ranks did in the step before its first action (read the batch) and after its gradients
were complete (agree on the loss, update the parameters) is no part of it.

Each rank counts seconds since its own start, so its times mean nothing beside those of another one.
What is known of two clocks comes from what happened between them. With o the offset to add:

    a message   posted at s on rank a, used at u on rank b         s + o_a <= u + o_b
    a gather    begun at s on rank a, left at e on rank b        s + o_a <= e + o_b

The tightest of these bounds, also through third ranks, leave an interval for each offset to the
first rank, of which the middle is taken. The middles together keep every bound: with d(r,s) the
most by which o_s can be above o_r, o_r = (d(0,r) - d(r,0)) / 2, so that o_s - o_r is half of
d(0,s) - d(0,r), at most d(r,s), and half of d(r,0) - d(s,0), at most that too. Half of the widest
interval is what is not known. Clocks of two hosts drift, so only what lies close in time is used.

Timelines are written as Chrome traces, which chrome://tracing and ui.perfetto.dev open as they are:

    {"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}      compressed with gzip

A process is a rank, with a track "compute" for what it runs (F0.3, BW0.3) and a track "pp" for what
it sends (activation 3 stage 0 -> 1). A planned and a measured trace of one run have the same tracks
with the same names on them. Where the mesh has other axes, a measured trace also has a track for
each, with the collectives that were recorded; the simulation of a pipeline knows nothing of those.
Context ranks have a track "attention" with the work that their transfers hide behind.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, permutations, takewhile
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from echelon.core.axis import Axis
from echelon.core.disk import disk_errors
from echelon.core.event import ATTEND, BESIDE_MESSAGES, MULTIPLY, Event
from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import ActionWithMessages, Message, ScheduleMessages
from echelon.schedule.simulate import Durations, simulate
from echelon.telemetry.recorded_steps import ACTION_KINDS, RecordedStep

SEND = "send"
GRADIENT_SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""The collectives that complete gradients: over data ranks, and over ranks of a pipeline that hold
the same parameters, both ends of a tied model or the copies of mirrored stages."""
_NOT_OF_DATA = (Axis.TP.value, Axis.CP.value)

MOST_RANKS = 64
"""Ranks that are drawn and traced: as many whole pipelines as fit, and at least one."""

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
    begin = first_start(step, clocks)
    aligned = {
        rank: [shifted(event, clocks.offset_s[rank] - begin) for event in events]
        for rank, events in step.events.items()
    }
    return tuple(_measured(pipe, aligned) for pipe in pipes)


def first_start(step: RecordedStep, clocks: ClockOffsets) -> float:
    """Return when the first action of a step began, on the clock that ranks share."""
    return min(
        event.start + clocks.offset_s[rank]
        for rank, events in step.events.items()
        for event in events
        if event.kind in ACTION_KINDS
    )


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


COMPUTE, ATTENTION = "compute", "attention"
_TRACKS = {ATTEND: ATTENTION, MULTIPLY: "products"}
PLANNED, MEASURED = "planned.json.gz", "measured.json.gz"

_MICROSECONDS = 1e6  # of a second

T = TypeVar("T")


def trace_path(run_dir: Path, name: str) -> Path:
    """Return where a run keeps a trace."""
    return run_dir / "traces" / name


def chrome_trace(
    steps: Mapping[int, Sequence[Timeline]], mesh: Mesh, *, about: Mapping[str, object]
) -> dict[str, Any]:
    """Return the trace of some steps, each by its number with the timelines of its pipelines.

    Steps follow one another: the time between them, in which no pipeline runs, is left out.
    """
    events: dict[int, dict[str, list[tuple[Event, int]]]] = {}
    begin = 0.0
    for number, timelines in sorted(steps.items()):
        for timeline in timelines:
            for event in (*timeline.events, *timeline.others):
                later = shifted(event, begin)
                tracks = events.setdefault(event.rank, {})
                track = _TRACKS.get(event.kind) or event.axis or COMPUTE
                tracks.setdefault(track, []).append((later, number))
        begin += max(_end_of(timeline) for timeline in timelines)
    found: list[dict[str, object]] = []
    for rank, tracks in sorted(events.items()):
        found.append(track_name("process_name", rank, 0, f"rank {rank} ({mesh.label(rank)})"))
        thread = 0
        for track in sorted(tracks, key=lambda name: (name != COMPUTE, name)):
            for lane_events in lanes(tracks[track], _span):
                found.append(track_name("thread_name", rank, thread, track))
                found.extend(_complete(event, step, thread) for event, step in lane_events)
                thread += 1
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": dict(about)}


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace, in the place of an older one of the same run; EnvironmentProblem if it fails.

    A reader sees the old one or the new one, never half of one.
    """
    data = json.dumps(trace, separators=(",", ":")).encode()
    with disk_errors(f"to write {path}"):
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_bytes(gzip.compress(data, compresslevel=6, mtime=0))
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def _end_of(timeline: Timeline) -> float:
    every = (*timeline.events, *timeline.others)
    return max(timeline.gradients_s, *(event.end for event in every))


def lanes(things: Iterable[T], span: Callable[[T], tuple[float, float]]) -> list[list[T]]:
    """Return the things of a track in as few lines as show each one beside those of its time.

    Messages and collectives overlap; on one line, a trace may only nest. `span` is a start and end.
    """
    threads: list[list[T]] = []
    for one in sorted(things, key=span):
        start = span(one)[0]
        free = next((thread for thread in threads if span(thread[-1])[1] <= start), None)
        if free is None:
            threads.append(free := [])
        free.append(one)
    return threads


def _span(event: tuple[Event, int]) -> tuple[float, float]:
    return event[0].start, event[0].end


def track_name(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    """Return the event that names a process (`process_name`) or a track (`thread_name`)."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(event: Event, step: int, tid: int) -> dict[str, object]:
    args = {
        "step": step,
        "stage": event.stage,
        "microbatch": event.microbatch,
        "bytes": event.bytes or None,
    }
    # Both ends are rounded alike, so that events that touch do not overlap.
    start, end = round(event.start * _MICROSECONDS, 3), round(event.end * _MICROSECONDS, 3)
    return {
        "name": event.name,
        "cat": event.kind,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": event.rank,
        "tid": tid,
        "args": {key: value for key, value in args.items() if value is not None},
    }
