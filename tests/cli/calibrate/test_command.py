"""`echelon calibrate`: which flags go together, and what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from echelon.cli.main import main
from echelon.config.cluster.file import CalibrationRecord, cluster_toml
from echelon.config.load import load_job
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


@pytest.mark.parametrize("flags", [["nano"], ["runs/x"]])
def test_what_one_process_does_is_not_started_by_torchrun(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["calibrate", *flags]) == 2
    told = capsys.readouterr().err
    assert "error[bad-argument]" in told
    assert f"{flags[0]} is work for one" in told


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


def _calibrated(path: Path, date: str) -> str:
    cluster = load_job("nano", ["cluster.preset=2xcpu-core", "mesh.dp_replicate=2"]).plan.cluster
    record = CalibrationRecord(
        date=date,
        torch="2.13.0",
        echelon="0.1.0",
        nodes=1,
        ranks_per_node=2,
        held_out=(("products", 0.125),),
    )
    device = replace(cluster.device, peak_flops=(("fp32", 1e11),))
    path.write_text(cluster_toml(replace(cluster, device=device), (), record))
    return str(path)


def test_calibrations_are_merged_and_the_medians_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [_calibrated(tmp_path / f"{name}.toml", f"2026-11-2{name}") for name in (1, 2)]
    out = tmp_path / "c.toml"
    assert main(["calibrate", "merge", *files, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 files, 2 calibrations" in printed
    assert [line for line in printed.splitlines() if len(line) > 80 and str(out) not in line] == []
    assert ["products", "12%"] in [line.split() for line in printed.splitlines()]
    assert f"--cluster {out}" in printed
    assert main(["calibrate", "merge", *files, "--out", str(tmp_path / "d.toml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == "calibrate merge"
    assert told["calibration"]["date"] == "2026-11-22"
    assert [one["file"] for one in told["files"]] == files
    assert main(["calibrate", "merge", *files, "--out", str(out), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["command"], told["problems"][0]["rule"]) == ("calibrate merge", "never-overwrite")


def test_a_merge_says_where_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "merge", "a.toml"]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["calibrate", "bogus"]) == 2
    assert "bogus" in capsys.readouterr().err


def test_only_the_first_rank_of_a_launch_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SimpleNamespace(rank=3)
    monkeypatch.setattr("echelon.cli.calibrate.calibrate_machine", lambda **_: found)
    assert main(["calibrate"]) == 0
    assert capsys.readouterr().out == ""
