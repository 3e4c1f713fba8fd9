"""`echelon calibrate`: which flags go together, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.telemetry.recorded_runs import plan_of, stage_times, write_run


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["nano", "--ranks", "2"], "nano has its own ranks"),
        (["runs/x", "--ranks", "2"], "runs/x has its own ranks"),
        (["tests", "--set", "mesh.pp=2"], "tests is one that has been"),
        (["--set", "mesh.pp=2"], "are of no run"),
    ],
)
def test_flags_of_different_measurements(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *flags]) == 2
    told = capsys.readouterr().err
    assert "error[bad-argument]" in told
    assert says in told


def test_what_a_run_changed_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of("cluster.preset=8xcpu-core", "pipeline.schedule=1f1b")
    steps = {number: stage_times(0.02, 0.02) for number in range(1, 4)}
    run = write_run(tmp_path / "run", plan, [steps])
    flags = ["calibrate", str(run.path), "--out"]
    assert main([*flags, str(tmp_path / "cluster.toml")]) == 0
    printed = capsys.readouterr().out
    assert "F of stage 0" in printed
    assert "matmul" in printed
    assert main([*flags, str(tmp_path / "again.toml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["command"], told["steps"]) == (1, "calibrate", 2)
    assert {one["name"] for one in told["changes"]} >= {"matmul", "memory", "launch_s"}
    assert main([*flags, str(tmp_path / "again.toml")]) == 2
    assert "never-overwrite" in capsys.readouterr().err
