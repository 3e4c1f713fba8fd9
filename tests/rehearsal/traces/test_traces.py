"""Traces of rehearsed ranks: their tracks, their bytes, their memory, their times."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.rehearsal.run import Rehearsal, rehearse
from echelon.rehearsal.traces import KERNELS, MEMORY, WAITS, TraceFolder
from echelon.schedule.from_plan import schedule_from_plan
from echelon.telemetry.timeline import COMPUTE
from tests.rehearsal.test_run import plan_of

FLAGS = ("mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3", "model.layers=4", "train.seed=1")
ROUNDING = 0.0021
"""Microseconds: a start and a duration are rounded to 3 digits each, and compared with others."""

Trace = dict[str, Any]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsal, dict[int, Trace]]:
    folder = tmp_path_factory.mktemp("rehearsed") / "traces"
    plan = plan_of(*FLAGS)
    found = rehearse(plan, workers=1, traces=folder)
    names = TraceFolder(path=folder, plan=plan, spans=())
    traces: dict[int, Trace] = {}
    for one in found.ranks:
        traces[one.rank] = json.loads(gzip.decompress(names.file(one.rank).read_bytes()))
    assert len(list(folder.iterdir())) == len(traces)
    return found, traces


def tracks_of(trace: Trace) -> dict[str, list[dict[str, Any]]]:
    events = trace["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    tracks: dict[str, list[dict[str, Any]]] = {}
    for one in events:
        if one["ph"] == "X":
            tracks.setdefault(names[one["tid"]], []).append(one)
    return tracks


@pytest.mark.slow
def test_each_distinct_rank_has_the_tracks_of_what_it_does(
    rehearsed: tuple[Rehearsal, dict[int, Trace]],
) -> None:
    found, traces = rehearsed
    schedule = schedule_from_plan(found.plan)
    assert sorted(traces) == [0, 1, 2, 3]
    for one in found.ranks:
        trace, tracks = traces[one.rank], tracks_of(traces[one.rank])
        assert trace["otherData"]["rank"] == one.rank
        assert "estimated" in trace["otherData"]["times"]
        row = schedule.actions[one.rank // 2]
        assert [event["name"] for event in tracks[COMPUTE]] == [str(action) for action in row]
        kernels = Counter(event["name"] for event in tracks[KERNELS])
        assert kernels == sum((work.by_name for work in one.work.values()), Counter[str]())
        assert sum(event["args"]["flops"] for event in tracks[KERNELS]) == sum(
            work.flops for work in one.work.values()
        )
        assert any(event["name"].startswith("wait for ") for event in tracks[WAITS])
        assert any(event["cat"] == "host" for event in tracks[WAITS])


def test_bytes_of_communicators_add_up_to_what_is_sent(
    rehearsed: tuple[Rehearsal, dict[int, Trace]],
) -> None:
    found, traces = rehearsed
    for one in found.ranks:
        operations = [
            event
            for track, events in tracks_of(traces[one.rank]).items()
            if track not in (COMPUTE, KERNELS, WAITS)
            for event in events
        ]
        sent = sum(event["args"]["bytes"] for event in operations)
        assert sent == sum(one.sent.values()) == sum(found.sent[one.rank].values())


def test_the_counter_of_memory_has_the_rehearsed_peak(
    rehearsed: tuple[Rehearsal, dict[int, Trace]],
) -> None:
    found, traces = rehearsed
    for one in found.ranks:
        counters = [event for event in traces[one.rank]["traceEvents"] if event["ph"] == "C"]
        assert {event["name"] for event in counters} == {MEMORY}
        assert counters[0]["args"] == dict(one.held)
        assert max(sum(event["args"].values()) for event in counters) == one.peak_bytes
        for term, most in one.most.items():
            assert max(event["args"].get(term, 0) for event in counters) == most


def test_kernels_stay_inside_of_their_actions(
    rehearsed: tuple[Rehearsal, dict[int, Trace]],
) -> None:
    _, traces = rehearsed
    tracks = tracks_of(traces[0])
    times = [event["ts"] for event in traces[0]["traceEvents"] if event["ph"] == "C"]
    assert times == sorted(times)
    filled = 0.0
    for action in tracks[COMPUTE]:
        begin, end = action["ts"], action["ts"] + action["dur"]
        filled += end - begin
        for kernel in tracks[KERNELS]:
            first, last = kernel["ts"], kernel["ts"] + kernel["dur"]
            outside = last <= begin + ROUNDING or first >= end - ROUNDING
            assert outside or (first >= begin - ROUNDING and last <= end + ROUNDING)
    # Kernels fill their actions, and more where something is outside.
    spent = sum(kernel["dur"] for kernel in tracks[KERNELS])
    assert spent >= filled - ROUNDING * len(tracks[KERNELS])


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        rehearse(plan_of(), workers=1, traces=tmp_path)
    assert refused.value.rules == ("never-overwrite",)
    assert not list(tmp_path.iterdir())


def test_ranks_that_are_only_compared_leave_no_trace(tmp_path: Path) -> None:
    plan = plan_of("mesh.dp_replicate=32", "cluster.preset=32xcpu", "batch.global_sequences=64")
    found = rehearse(plan, workers=2, traces=tmp_path / "traces")
    assert len(found.checked) == 4
    assert [file.name for file in (tmp_path / "traces").iterdir()] == ["rank-0000.json.gz"]
