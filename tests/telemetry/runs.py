"""A job and a run to observe, and what it left, read whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.event import Event
from echelon.telemetry.events import events_files, events_path
from echelon.telemetry.json_lines import read_entries
from echelon.telemetry.run_directory import RunDirectory, create_run
from echelon.training.observer import StepFacts


def make_job(*, steps: int = 10, log_every: int = 1, events: bool = True) -> Job:
    """Return the job of the smallest preset, with `steps` steps."""
    job = load_job("nano")
    return replace(
        job,
        train=replace(job.train, steps=steps),
        observe=replace(job.observe, log_every=log_every, events=events),
    )


def make_run(runs_dir: Path, name: str = "nano", *, name_was_given: bool = True) -> RunDirectory:
    """Make a run directory."""
    return create_run(
        runs_dir,
        name,
        name_was_given=name_was_given,
        plan=make_job().plan,
        run_toml='extends = "nano"\n',
        environment={"host": "here"},
    )


def facts(step: int, loss: float = 2.5) -> StepFacts:
    """Return what training says about one step of a dense model."""
    return StepFacts(
        routing=None,
        loads={},
        loss_scale=1.0,
        skipped=False,
        step=step,
        loss=loss,
        grad_norm=0.5,
        learning_rate=3e-4,
        tokens=1000,
        step_s=0.5,
        rank_waits_s=(0.125, 0.0),
        rank_used_bytes=(2**30, 2**31),
    )


def plain_events(run_dir: Path, rank: int) -> Path:
    """Return the file of the events of a rank, unpacked: as earlier versions wrote it."""
    packed = events_path(run_dir, rank)
    plain = packed.with_suffix("")
    if packed.is_file():
        plain.write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return plain


def read_trace(path: Path) -> dict[str, Any]:
    """Return the trace in a file."""
    return json.loads(gzip.decompress(path.read_bytes()))


def names_by_track(trace: Mapping[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Return, for each process and track of a trace, the names of the events on it."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], set[str]] = {}
    for event in events:
        if event["ph"] == "X":
            place = processes[event["pid"]], tracks[event["pid"], event["tid"]]
            found.setdefault(place, set()).add(event["name"])
    return found


def read_events(run_dir: Path, rank: int) -> Iterator[Event]:
    """Yield the events of a rank, in the order in which they were written."""
    for path in events_files(run_dir, rank):
        for entry in read_entries(path):
            yield entry.event(rank)
