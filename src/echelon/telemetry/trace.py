# SPDX-License-Identifier: Apache-2.0
"""Timelines as Chrome traces, which chrome://tracing and ui.perfetto.dev open as they are.

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
from pathlib import Path
from typing import Any, TypeVar

from echelon.core.disk import disk_errors
from echelon.core.event import ATTEND, MULTIPLY, Event
from echelon.core.mesh import Mesh
from echelon.telemetry.timeline import Timeline, shifted

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
