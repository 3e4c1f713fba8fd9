# SPDX-License-Identifier: Apache-2.0
"""The trace of a rehearsed rank: its step on a time axis, for chrome://tracing and ui.perfetto.dev.

    {"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}      compressed with gzip

A file is a rank, with the tracks

compute              the actions of its schedule, when the simulator says that they run
kernels (estimated)  what it gives its device, inside of the actions
COMMUNICATOR         its operations on each, from issue to wait, with the bytes that it sends
waits                where it waits for one of them, and where its host reads from the device
memory               what lives on the device, by term, as a counter

A rehearsal computes nothing, so no time is measured. Actions have the seconds of `cost/seconds/`.
A kernel has its share of its action: by the time that its bytes take the memory of the device, or
its FLOPs the peak of the device, where these are more. What is outside of actions has just that
time, and no more than there is between two actions. Waits take none: what a rank waits for is in
the time of its actions.

Only a rank whose trace is wanted writes its `StepLog`: its log, its memory and its counter of
kernels are of the kinds below, which append to one list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from echelon.config.files.new_file import make_folder, require_free_names
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.seconds.unit_times import stage_durations, unit_times_from_formulas
from echelon.rehearsal.memory import HOST, MemoryMeter
from echelon.rehearsal.order import Issue, RankLog
from echelon.rehearsal.work import KernelWork, WorkCounter
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import simulate
from echelon.telemetry.timeline import COMPUTE, lanes, track_name, write_trace


@dataclass(frozen=True, slots=True)
class ActionBegan:
    """Say that an action of the schedule began."""

    name: str


@dataclass(frozen=True, slots=True)
class ActionEnded:
    """Say that the action ended that had begun last."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Say that the device was given a kernel: its name, the bytes that it moves, its FLOPs."""

    name: str
    num_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Issued:
    """Say that a communicator was given an operation; `number` is its place in the log."""

    number: int
    issue: Issue


@dataclass(frozen=True, slots=True)
class Awaited:
    """Say that the operation was awaited that stands at a place in the log."""

    number: int


@dataclass(frozen=True, slots=True)
class HostWaited:
    """Say that the host read from the device: what asked for it, and where."""

    operation: str
    where: str


@dataclass(frozen=True, slots=True)
class Held:
    """Say what lives on the device from here on, by term."""

    by_term: Mapping[str, int]


StepItem: TypeAlias = ActionBegan | ActionEnded | Kernel | Issued | Awaited | HostWaited | Held


class StepLog:
    """Collect what a rank does in a step."""

    def __init__(self) -> None:
        """Begin without anything."""
        self.items: list[StepItem] = []

    def step_began(self, held: Mapping[str, int]) -> None:
        """Forget the step before; say what lives between the two."""
        self.items = [Held(held)]


class SteppedLog(RankLog):
    """A log that also writes into that of the step."""

    def __init__(self, rank: int, step: StepLog) -> None:
        """Begin without any entries."""
        super().__init__(rank)
        self._step = step

    def issue(self, one: Issue) -> int:
        """Write down an operation."""
        number = super().issue(one)
        self._step.items.append(Issued(number, one))
        return number

    def wait(self, issue: int) -> None:
        """Write down a wait."""
        super().wait(issue)
        self._step.items.append(Awaited(issue))

    def host_read(self, operation: str, where: str, task: str = "", what: str = "") -> None:
        """Write down that the host reads from the device."""
        super().host_read(operation, where, task, what)
        self._step.items.append(HostWaited(operation, where))


class SteppedMemory(MemoryMeter):
    """A meter that writes each change into the log of the step."""

    def __init__(self, step: StepLog) -> None:
        """Begin with nothing."""
        super().__init__()
        self._step = step

    def _add(self, term: str, num_bytes: int) -> None:
        super()._add(term, num_bytes)
        if term != HOST and num_bytes:
            self._step.items.append(Held(self.now()))


class SteppedWork(WorkCounter):
    """A counter that writes each kernel into the log of the step."""

    def __init__(self, step: StepLog) -> None:
        """Begin with none."""
        super().__init__()
        self._step = step

    def ran(self, task: str, kernel: KernelWork | None, times: int = 1) -> None:
        """Count a kernel."""
        super().ran(task, kernel, times)
        if kernel is not None:
            self._step.items.append(Kernel(kernel.name, kernel.num_bytes, kernel.flops))


KERNELS, WAITS, MEMORY = "kernels (estimated)", "waits", "memory"
TIMES = (
    "actions: simulated by cost/seconds/; kernels: estimated, by bytes and FLOPs at the device's "
    "peaks; operations of communicators: from issue to wait. Nothing is measured."
)
ENDING = ".json.gz"
"""What the name of a trace ends in."""
_MICROSECONDS = 1e6  # of a second

Spans: TypeAlias = Mapping[str, tuple[float, float]]
"""When each action of a rank begins and ends, in seconds."""
_Timed: TypeAlias = tuple[float, float, StepItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFolder:
    """Say where traces go, `stem`-RANK.json.gz, and when the actions of each pipeline rank run."""

    path: Path
    plan: Plan
    spans: Sequence[Spans]
    stem: str = "rank"
    left_out: frozenset[int] = frozenset()
    """Ranks that leave none."""

    @classmethod
    def new(cls, path: Path, plan: Plan) -> TraceFolder:
        """Make the folder for a plan, with the times of a step by the simulator.

        A path NAME.json.gz stands for files NAME-RANK.json.gz, in a folder that may be there.
        ConfigError where the folder is there, or with a name one of the files.
        """
        folder, stem = path, "rank"
        if path.name.endswith(ENDING):
            require_free_names(path, ENDING)
            folder, stem = path.parent, path.name.removesuffix(ENDING)
        if folder is path or not folder.is_dir():
            make_folder(folder)
        schedule = schedule_from_plan(plan)
        durations = stage_durations(plan, unit_times_from_formulas(plan))
        spans: list[dict[str, tuple[float, float]]] = [{} for _ in range(plan.mesh.pp)]
        for event in simulate(schedule, durations).events:
            if not event.axis:
                spans[event.rank][event.name] = (event.start, event.end)
        return cls(path=folder, plan=plan, spans=spans, stem=stem)

    def file(self, rank: int) -> Path:
        """Return where the trace of a rank is."""
        return self.path / f"{self.stem}-{rank:04}{ENDING}"

    def write(self, rank: int, items: Sequence[StepItem]) -> None:
        """Write the trace of a rank."""
        write_trace(self.file(rank), rank_trace(self.plan, rank, items, self._spans_of(rank)))

    def _spans_of(self, rank: int) -> Spans:
        return self.spans[self.plan.mesh.coordinates(rank)[Axis.PP]]


def rank_trace(plan: Plan, rank: int, items: Sequence[StepItem], spans: Spans) -> dict[str, Any]:
    """Return the trace of what a rank does in a step."""
    timed = list(_timed(items, spans, _Roofline.of(plan)))
    end = timed[-1][1] if timed else 0.0
    tracks: dict[str, list[_Slice]] = {}
    counters: list[dict[str, object]] = []
    for one in _slices(timed, end):
        tracks.setdefault(one.track, []).append(one)
    for start, _, item in timed:
        if isinstance(item, Held):
            counters.append(_counter(rank, start, item))
    label = f"rank {rank} ({plan.mesh.label(rank)})"
    found: list[dict[str, object]] = [track_name("process_name", rank, 0, label)]
    thread = 0
    order = {COMPUTE: 0, KERNELS: 1, WAITS: 2}
    for track in sorted(tracks, key=lambda name: (order.get(name, len(order)), name)):
        for lane in lanes(tracks[track], lambda one: (one.start, one.end)):
            found.append(track_name("thread_name", rank, thread, track))
            found.extend(one.complete(rank, thread) for one in lane)
            thread += 1
    about = {
        "plan": plan.name,
        "plan_hash": plan.content_hash(),
        "schedule": plan.layout.pipeline.schedule,
        "rank": rank,
        "world_size": plan.mesh.world_size,
        "microbatches": plan.num_microbatches,
        "times": TIMES,
    }
    return {"traceEvents": found + counters, "displayTimeUnit": "ms", "otherData": about}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A stretch of time on a track."""

    track: str
    name: str
    kind: str
    start: float
    end: float
    args: Mapping[str, object] = field(default_factory=dict[str, object])

    def complete(self, pid: int, tid: int) -> dict[str, object]:
        """Return the slice as an event of a trace; both ends are rounded alike."""
        start, end = round(self.start * _MICROSECONDS, 3), round(self.end * _MICROSECONDS, 3)
        return {
            "name": self.name,
            "cat": self.kind,
            "ph": "X",
            "ts": start,
            "dur": round(end - start, 3),
            "pid": pid,
            "tid": tid,
            "args": dict(self.args),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roofline:
    """Say how long a kernel takes at the least."""

    memory_bandwidth: float
    flops: float

    @classmethod
    def of(cls, plan: Plan) -> _Roofline:
        """Return the peaks of the plan's device, for products in the dtype of the parameters."""
        device = plan.cluster.device
        known = device.flops(plan.mathematics.precision.parameters)
        flops = known or max((count for _, count in device.peak_flops), default=float("inf"))
        return cls(memory_bandwidth=device.memory_bandwidth, flops=flops)

    def seconds(self, item: StepItem) -> float:
        """Return the seconds of a kernel; what is none takes none."""
        if not isinstance(item, Kernel):
            return 0.0
        return max(item.num_bytes / self.memory_bandwidth, item.flops / self.flops)


def _timed(items: Sequence[StepItem], spans: Spans, roofline: _Roofline) -> Iterator[_Timed]:
    """Yield each item with its start and end; the step starts at 0, before the first action."""
    parts = _parts(items)
    sums = [sum(map(roofline.seconds, part)) for _, part in parts]
    before = sums[0] if parts and not parts[0][0] else 0.0
    now = 0.0
    for place, ((action, part), total) in enumerate(zip(parts, sums, strict=True)):
        following = parts[place + 1][0] if place + 1 < len(parts) else ""
        if action:
            now, end = (before + one for one in spans[action])
            scale = (end - now) / total if total else 0.0
        else:
            free = before + spans[following][0] - now if following else total
            scale = min(1.0, free / total) if total else 0.0
            end = now + scale * total
        for item in part:
            start, now = now, min(end, now + scale * roofline.seconds(item))
            yield (start, end if isinstance(item, ActionBegan) else now, item)
        now = end


def _parts(items: Iterable[StepItem]) -> list[tuple[str, list[StepItem]]]:
    """Return the items of each action, and of what is before, between and after ("")."""
    parts: list[tuple[str, list[StepItem]]] = [("", [])]
    for item in items:
        if isinstance(item, ActionBegan):
            parts.append((item.name, []))
        parts[-1][1].append(item)
        if isinstance(item, ActionEnded):
            parts.append(("", []))
    return parts


def _slices(timed: Sequence[_Timed], end_of_step: float) -> Iterator[_Slice]:
    """Yield what is drawn of a step; what nobody awaits in it is in flight to its end."""
    under_way: dict[int, tuple[float, Issued]] = {}
    for start, end, item in timed:
        if isinstance(item, ActionBegan):
            kind = item.name.rstrip("0123456789.")
            yield _Slice(track=COMPUTE, name=item.name, kind=kind, start=start, end=end)
        elif isinstance(item, Kernel):
            args = {"bytes_moved": item.num_bytes, "flops": item.flops}
            yield _Slice(
                track=KERNELS, name=item.name, kind="estimated", start=start, end=end, args=args
            )
        elif isinstance(item, Issued):
            under_way[item.number] = (start, item)
        elif isinstance(item, Awaited) and item.number in under_way:
            began, issued = under_way.pop(item.number)
            yield _operation(issued, began, start)
            name = f"wait for {issued.issue.name}"
            yield _Slice(track=WAITS, name=name, kind="wait", start=start, end=start)
        elif isinstance(item, HostWaited):
            name, args = f"host reads {item.operation}", {"where": item.where}
            yield _Slice(track=WAITS, name=name, kind="host", start=start, end=start, args=args)
    for began, issued in under_way.values():
        yield _operation(issued, began, end_of_step)


def _operation(issued: Issued, start: float, end: float) -> _Slice:
    issue = issued.issue
    args: dict[str, object] = {
        "kind": issue.kind,
        "dtype": issue.dtype,
        "members": len(issue.members),
        "payload_bytes": issue.num_bytes,
        "bytes": issue.sent_bytes,
        "at": issue.task,
    }
    track = issue.communicator
    return _Slice(track=track, name=issue.name, kind=issue.kind, start=start, end=end, args=args)


def _counter(pid: int, at: float, held: Held) -> dict[str, object]:
    return {
        "name": MEMORY,
        "ph": "C",
        "ts": round(at * _MICROSECONDS, 3),
        "pid": pid,
        "args": dict(held.by_term),
    }
