"""A run's own events refine the constants of its cluster; what waited for others is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.api.calibrating.run import calibrate_run, computed_s, group_collective
from echelon.cli.calibrate import run_json, run_report
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.event import Event
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run

WIDTH = 80


def _event(start: float, end: float, kind: str = "all_reduce", **rest: object) -> Event:
    return Event(kind=kind, name="x", start=start, end=end, **rest)  # type: ignore[arg-type]


def test_an_action_computes_while_no_collective_is_under_way() -> None:
    action = _event(10.0, 20.0, "F")
    assert computed_s(action, []) == 10.0
    # Two that overlap count once, and of those at its ends only what lies inside.
    sent = [_event(12.0, 14.0), _event(13.0, 15.0), _event(9.0, 11.0), _event(19.0, 30.0)]
    assert computed_s(action, sent) == 10.0 - 3.0 - 1.0 - 1.0
    assert computed_s(action, [_event(0.0, 30.0)]) == 0.0


def test_bytes_of_an_event_are_those_of_one_rank_and_of_a_collective_the_whole() -> None:
    mesh = plan_of("mesh.dp_replicate=2", "mesh.tp=2").mesh
    found = group_collective(mesh, _event(0.0, 1.0, axis="dp", bytes=600))
    assert found is not None
    # An all-reduce over two ranks sends 2 (n-1)/n = 1 times its bytes.
    assert (found.collective.kind, found.collective.degree) == ("all_reduce", 2)
    assert found.collective.num_bytes == 600
    assert (found.stride, found.axis) == (2, "dp")
    gathered = group_collective(mesh, _event(0.0, 1.0, "all_gather", axis="tp", bytes=50))
    assert gathered is not None
    assert (gathered.collective.num_bytes, gathered.stride) == (100, 1)


def test_what_sends_nothing_or_has_no_even_group_is_left_out() -> None:
    mesh = plan_of("mesh.tp=2").mesh
    assert group_collective(mesh, _event(0.0, 1.0, axis="tp", bytes=0)) is None
    assert group_collective(mesh, _event(0.0, 1.0, axis="dp", bytes=9)) is None
    assert group_collective(mesh, _event(0.0, 1.0, axis="pp", bytes=9)) is None


def test_a_run_refines_its_cluster(tmp_path: Path) -> None:
    plan = plan_of("cluster.preset=8xcpu-core", "mesh.dp_replicate=2", "pipeline.schedule=1f1b")
    steps = {number: stage_times(0.02, 0.02) for number in range(1, 5)}
    run = write_run(tmp_path / "run", plan, [steps])
    found = calibrate_run(run.path, out=tmp_path / "cluster.toml")
    assert found.steps == 3  # The first one warms up.
    assert {one.name for one in found.times} >= {"F of stage 0", "BW of stage 1"}
    forward = next(one for one in found.times if one.name == "F of stage 0")
    assert forward.seconds == pytest.approx(0.02)
    assert abs(forward.after) < abs(forward.before)
    matmul = next(one for one in found.changes if one.name == "matmul")
    assert matmul.after < matmul.before
    again = load_job("nano", [f"cluster.file={found.out}", "mesh.pp=2"]).plan.cluster
    assert again.device.efficiency.matmul == pytest.approx(matmul.after, rel=1e-5)
    lines = run_report(found).splitlines()
    assert [line for line in lines if len(line) > WIDTH and str(tmp_path) not in line] == []
    assert run_json(found)["steps"] == 3


def test_a_run_without_events_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plan_of("cluster.preset=8xcpu-core"), [])
    with pytest.raises(ConfigError) as caught:
        calibrate_run(run.path, out=tmp_path / "cluster.toml")
    assert caught.value.rules == ("run-has-events",)
    assert not (tmp_path / "cluster.toml").exists()
