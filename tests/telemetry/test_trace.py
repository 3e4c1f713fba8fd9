"""Chrome traces: what other tools ask of them, and the same names on planned and measured."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import EnvironmentProblem
from echelon.cost.seconds.unit_times import unit_times_from_formulas
from echelon.schedule.from_plan import schedule_from_plan
from echelon.telemetry.schedule_report import (
    read_schedule_report,
    write_planned_trace,
    write_traces,
)
from echelon.telemetry.timeline import MEASURED, PLANNED, trace_path, write_trace
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run
from tests.telemetry.runs import names_by_track, read_trace

TIMES = stage_times(1.0, 2.0, transfer_s=0.25)


def _spans(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            span = event["ts"], event["ts"] + event["dur"]
            found.setdefault((event["pid"], event["tid"]), []).append(span)
    return found


def test_planned_and_measured_have_the_same_names_on_the_same_tracks(tmp_path: Path) -> None:
    plan = plan_of()
    run = write_run(tmp_path, plan, [{step: TIMES for step in range(1, 6)}], clocks={1: 7.5})
    write_planned_trace(run.path, plan, unit_times_from_formulas(plan))
    before = read_trace(trace_path(run.path, PLANNED))
    planned, measured = write_traces(read_schedule_report(run.path))
    names = names_by_track(read_trace(measured))
    assert names == names_by_track(read_trace(planned)) == names_by_track(before)
    assert set(names) == {
        (f"rank {rank} (pp{rank})", track) for rank in (0, 1) for track in ("compute", "pp")
    }
    for rank in (0, 1):
        row = {str(action) for action in schedule_from_plan(plan).actions[rank]}
        assert names[f"rank {rank} (pp{rank})", "compute"] == row
    messages = names["rank 0 (pp0)", "pp"]
    assert messages == {f"activation {m} stage 0 -> 1" for m in range(plan.num_microbatches)}


def test_collectives_of_other_axes_have_tracks_of_their_own(tmp_path: Path) -> None:
    plan = plan_of("mesh.dp_replicate=2")
    run = write_run(tmp_path, plan, [{1: TIMES}])
    planned, measured = (
        names_by_track(read_trace(path)) for path in write_traces(read_schedule_report(run.path))
    )
    assert {track for _, track in measured} - {track for _, track in planned} == {"dp"}
    shared = {place: names for place, names in measured.items() if place[1] != "dp"}
    assert shared == planned
    assert len({process for process, _ in planned}) == 4


def test_attention_of_context_ranks_has_a_track_beside_its_transfers(tmp_path: Path) -> None:
    plan = plan_of("mesh.cp=2")
    run = write_run(tmp_path, plan, [{1: TIMES}])
    report = read_schedule_report(run.path)
    _, measured = write_traces(report)
    names = names_by_track(read_trace(measured))
    for rank in range(4):
        process = f"rank {rank} ({plan.mesh.label(rank)})"
        assert names[process, "attention"] == {"ring.forward.0"}
        assert names[process, "cp"] == {"gathered.gradients"}


def test_products_of_chunks_have_a_track_beside_their_messages(tmp_path: Path) -> None:
    plan = plan_of("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.tp_overlap=ring")
    run = write_run(tmp_path, plan, [{1: TIMES}])
    _, measured = write_traces(read_schedule_report(run.path))
    names = names_by_track(read_trace(measured))
    for rank in range(4):
        process = f"rank {rank} ({plan.mesh.label(rank)})"
        assert names[process, "products"] == {"row.forward.1"}
        assert names[process, "tp"] == {"row.forward.1"}


def test_a_trace_is_what_viewers_read(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{step: TIMES for step in range(1, 6)}])
    for path in write_traces(read_schedule_report(run.path)):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
        assert trace["displayTimeUnit"] == "ms"
        for event in trace["traceEvents"]:
            assert {"name", "ph", "pid", "tid"} <= set(event)
            if event["ph"] == "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
            else:
                assert event["ph"] == "M"
        for spans in _spans(trace).values():
            for (_, end), (start, _) in pairwise(sorted(spans)):
                assert end <= start + 1e-3, "events of one line do not overlap"


def test_a_measured_trace_holds_the_last_three_steps_and_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, plan_of(), [{step: TIMES for step in range(1, 6)}])
    _, path = write_traces(read_schedule_report(run.path))
    trace = read_trace(path)
    assert trace["otherData"]["steps"] == "3, 4, 5"
    assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"} == {3, 4, 5}
    for spans in _spans(trace).values():
        assert spans == sorted(spans), "steps follow one another"


def test_a_trace_takes_the_place_of_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = trace_path(tmp_path, MEASURED)
    for number in (1, 2):
        write_trace(path, {"traceEvents": [], "otherData": {"number": number}})
    assert read_trace(path)["otherData"] == {"number": 2}
    assert [entry.name for entry in path.parent.iterdir()] == [MEASURED]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("not a folder")
    with pytest.raises(EnvironmentProblem, match=r"measured\.json\.gz"):
        write_trace(trace_path(tmp_path, MEASURED), {"traceEvents": []})


def test_one_rank_has_traces_too(tmp_path: Path) -> None:
    plan = plan_of(pp=1)
    run = write_run(tmp_path, plan, [{1: stage_times(1.0)}])
    planned, measured = write_traces(read_schedule_report(run.path))
    names = names_by_track(read_trace(measured))
    assert names == names_by_track(read_trace(planned))
    assert set(names) == {("rank 0 (only rank)", "compute")}
