"""Runs as their ranks would leave them, without any rank: events written from a simulation."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.event import ATTEND, MULTIPLY, Event
from echelon.core.plan import Plan
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import Durations, simulate
from echelon.telemetry.events import METRICS_FILE, EventWriter, step_mark
from echelon.telemetry.recorded_steps import ACTION_KINDS
from echelon.telemetry.run_directory import RunDirectory, create_run

BATCH_S = 0.5
"""What every rank of these runs takes to read a batch."""

TAIL_S = 0.25
"""What summing the gradients over data ranks takes after the last action."""


def plan_of(*settings: str, pp: int = 2) -> Plan:
    """Return the smallest preset as a pipeline of `pp` ranks."""
    return load_job("nano", [f"mesh.pp={pp}", *settings]).plan


def stage_times(*forward_s: float, transfer_s: float = 0.0) -> Durations:
    """Return stages that take `forward_s` forward and twice that backward."""
    return Durations(
        forward_s=forward_s,
        backward_s=tuple(2 * s for s in forward_s),
        input_gradient_s=forward_s,
        weight_gradient_s=forward_s,
        transfer_s=(transfer_s,) * (len(forward_s) - 1),
        message_bytes=64,
    )


def events_of_step(plan: Plan, durations: Durations, *, begin: float) -> dict[int, list[Event]]:
    """Return what each rank records of a step that begins at `begin`, on a clock of all ranks."""
    found: dict[int, list[Event]] = {}
    simulated = simulate(schedule_from_plan(plan), durations)
    start = begin + BATCH_S
    last = start + simulated.makespan_s + (TAIL_S if plan.mesh.dp > 1 else 0.0)
    for pipe in plan.mesh.groups(Axis.PP):
        for place, rank in enumerate(pipe):
            events = [Event(kind="load", name="batch", start=begin, end=start)]
            events += [
                replace(event, start=event.start + start, end=event.end + start)
                for event in simulated.events
                if event.rank == place
            ]
            own = max(event.end for event in events)
            if plan.mesh.cp > 1:
                events += [
                    Event(kind=ATTEND, name="ring.forward.0", start=start, end=start + BATCH_S),
                    Event(
                        kind="reduce_scatter",
                        name="gathered.gradients",
                        axis="cp",
                        start=start,
                        end=own,
                    ),
                ]
            if plan.layout.tp_ring:
                end, name = start + BATCH_S, "row.forward.1"
                events += [
                    Event(kind=MULTIPLY, name=name, start=start, end=end),
                    Event(kind="all_to_all", name=name, axis="tp", start=start, end=end),
                ]
            if plan.mesh.dp > 1:
                name = "gradients.bucket0"
                events.append(Event(kind="all_reduce", name=name, axis="dp", start=own, end=last))
            ready = last if plan.mesh.dp > 1 else own
            events.append(_gather(ready, last + 0.001))
            events.append(Event(kind="update", name="optimizer", start=last + 0.001, end=last + 1))
            found[rank] = [replace(event, rank=rank) for event in _waited(events, start)]
    return found


def _waited(events: Sequence[Event], start: float) -> Iterator[Event]:
    """Yield events with what the rank waited: before an action, and in collectives all along."""
    free = start
    for event in events:
        if event.kind in ACTION_KINDS:
            yield replace(event, waited_s=event.start - free)
            free = event.end
        else:
            sums = event.kind in ("all_reduce", "all_gather")
            yield replace(event, waited_s=event.end - event.start) if sums else event


def write_run(
    folder: Path,
    plan: Plan,
    starts: Sequence[Mapping[int, Durations]],
    *,
    clocks: Mapping[int, float] | None = None,
    silent: Sequence[Collection[int]] = (),
    validates: bool = False,
) -> RunDirectory:
    """Make a run whose `starts` took steps: the durations of each, by its number.

    The clock of a rank shows `clocks` less than that of the run. `silent` are, for each start, the
    ranks that were killed before they wrote anything down.
    """
    run = create_run(
        folder,
        "run",
        name_was_given=True,
        plan=plan,
        run_toml='extends = "nano"\n',
        environment={"host": "here"},
    )
    offsets, rng = clocks or {}, random.Random(0)
    lines: list[dict[str, object]] = []
    for index, start in enumerate(starts):
        mute = silent[index] if index < len(silent) else ()
        ranks = [rank for rank in range(plan.mesh.world_size) if rank not in mute]
        writers = {rank: EventWriter(run.path, rank) for rank in ranks}
        lines.append({"kind": "start", "steps": max(start, default=0)})
        begin = 0.0
        for number, durations in start.items():
            waits_s = [rng.random() for _ in range(plan.mesh.world_size)]
            mark = step_mark(number, waits_s)
            lines.append({"kind": "step", "step": number, "mark": mark})
            recorded = events_of_step(plan, durations, begin=begin)
            end = max(event.end for events in recorded.values() for event in events)
            for rank, writer in writers.items():
                _record(writer, recorded[rank], offsets.get(rank, 0.0))
                writer.end_step(mark)
                if validates:
                    _record(writer, _validation(recorded[rank], end), offsets.get(rank, 0.0))
            begin = end
        for writer in writers.values():
            writer.close()
    metrics = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / METRICS_FILE).write_text(metrics, encoding="utf-8")
    return run


def _record(writer: EventWriter, events: Sequence[Event], behind_s: float) -> None:
    for event in events:
        writer.record(replace(event, start=event.start - behind_s, end=event.end - behind_s))


def _gather(start: float, end: float) -> Event:
    return Event(kind="all_gather", name="step", axis="world", start=start, end=end)


def _validation(events: Sequence[Event], begin: float) -> list[Event]:
    """Return a forward pass of every microbatch, as a validation after the step runs them."""
    forward = [event for event in events if event.kind == "F"]
    found = [
        replace(event, start=begin + 0.1 * index, end=begin + 0.1 * index + 0.05)
        for index, event in enumerate(forward)
    ]
    return [*found, _gather(begin + 9, begin + 10)]
