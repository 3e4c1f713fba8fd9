"""What `echelon train` and `echelon observe` do around a run: traces, and why there is none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from echelon.api.observing import observe_schedule, trace_plan, trace_run
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.cost.seconds.unit_times import stage_durations, unit_times_from_formulas
from echelon.telemetry.events import METRICS_FILE
from echelon.telemetry.timeline import MEASURED, PLANNED, trace_path
from tests.config.measured import times_file
from tests.telemetry.recorded_runs import stage_times, write_run
from tests.telemetry.runs import plain_events, read_trace

TIMES = stage_times(1.0, 1.0)
DEEP = ["model.layers=8", 'model.name="deep"', "mesh.pp=2"]


def _job(*settings: str) -> Job:
    return load_job("nano", ["mesh.pp=2", *settings])


def _planned(job: Job, run: Path) -> tuple[str, dict[str, float]]:
    """Return what the planned trace says of its times, and the seconds of its first actions."""
    trace_plan(job, run)
    trace = read_trace(trace_path(run, PLANNED))
    seconds = {event["name"]: event.get("dur", 0.0) / 1e6 for event in trace["traceEvents"]}
    return trace["otherData"]["durations"], seconds


def test_a_planned_trace_is_timed_by_what_the_plan_was_made_from(tmp_path: Path) -> None:
    path = times_file(load_job("nano", DEEP).plan, tmp_path / "times.json", head=4.0)
    measured = load_job("nano", [*DEEP, f"pipeline.times={path}"])
    about, seconds = _planned(measured, tmp_path)
    assert about == f"measured: {path}"
    # Stages of 6 blocks and of 2 with the head, a millisecond for each block: it is balanced.
    assert len(measured.plan.layout.pipeline.stages[0]) == 6
    assert seconds["F0.0"] == pytest.approx(6e-3, rel=0.2)
    assert seconds["F1.0"] == pytest.approx(seconds["F0.0"], rel=0.2)
    plain = load_job("nano", DEEP)
    about, seconds = _planned(plain, tmp_path)
    assert about == "modelled: cost/seconds/"
    modelled = stage_durations(plain.plan, unit_times_from_formulas(plain.plan))
    assert seconds["F0.0"] == pytest.approx(modelled.forward_s[0], abs=1e-8)


def test_a_run_without_events_is_not_traced(tmp_path: Path) -> None:
    job = _job("observe.events=false")
    run = write_run(tmp_path, job.plan, [{1: TIMES}]).path
    trace_plan(job, run)
    said: list[str] = []
    trace_run(job, run, say=said.append)
    assert said == []
    assert not trace_path(run, PLANNED).parent.exists()


@pytest.mark.parametrize("line", [b"???\n", b"{}\n", b"[]\n", None])
@pytest.mark.parametrize("name", [METRICS_FILE, "events.jsonl.gz", "events.rank-0001.jsonl.gz"])
def test_a_damaged_file_is_said_and_does_not_end_a_training_that_succeeded(
    tmp_path: Path, name: str, line: bytes | None
) -> None:
    job, said = _job(), list[str]()
    run = write_run(tmp_path, job.plan, [{1: TIMES}]).path
    file = run / name
    packed = file.suffix == ".gz"
    text = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
    lines = text.splitlines(keepends=True)
    if line is None:
        file.unlink()
        file.mkdir()
    else:
        changed = b"".join([*lines[:2], line, *lines[2:]])
        file.write_bytes(gzip.compress(changed) if packed else changed)
    trace_run(job, run, say=said.append)
    (text,) = said
    place = ": it cannot be read" if line is None else " line 3: "
    assert text.startswith(f"no measured trace: {file}{place}")


def test_a_newer_step_that_is_not_whole_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    run = write_run(tmp_path, _job().plan, [{1: TIMES, 2: TIMES}]).path
    assert observe_schedule(run, say=said.append).step == 2
    assert said == []
    events = plain_events(run, 1)
    events.write_bytes(events.read_bytes()[:-10])
    assert observe_schedule(run, say=said.append).step == 1
    assert said == ["step 2 was not recorded whole: this is step 1"]
    assert observe_schedule(run, step=1, say=said.append).step == 1
    assert len(said) == 1


def test_traces_that_cannot_be_written_are_said_and_leave_no_half_file(tmp_path: Path) -> None:
    said: list[str] = []
    run = write_run(tmp_path, _job().plan, [{1: TIMES}]).path
    traces = trace_path(run, MEASURED).parent
    traces.write_text("mine")
    assert observe_schedule(run, say=said.append).step == 1
    (text,) = said
    assert text.startswith("no traces written: the disk refused")
    assert traces.read_text() == "mine"
