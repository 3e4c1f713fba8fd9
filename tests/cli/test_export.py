"""`echelon export` prints or writes a plan for a tool; `echelon compare` shows two side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.config.show import resolved_toml


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_text_is_printed_and_what_is_recorded_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", "nano-zero3", "--to", "megatron"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("#!/bin/sh\n# Written by echelon export for Megatron-LM")
    assert 'recorded, not said: model.name = "nano": a name is for people' in output.err
    assert not list(Path().iterdir())


def test_a_file_is_written_once_and_imported_again(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", "nano-zero3", "--to", "deepspeed", "--out", "ds.json"]
    assert main(command) == 0
    assert capsys.readouterr().out == "ds.json\n"
    assert main(["import", "ds.json", "--output", "run.toml"]) == 0
    assert load_job("run.toml").plan == load_job("nano-zero3").plan
    capsys.readouterr()
    assert main(command) == 2
    assert "error[never-overwrite]" in capsys.readouterr().err


def test_a_setting_that_cannot_be_said_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "nano-zero3", "--to", "torchtitan", "--out", "a.toml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith('error[export-not-expressible]: optimizer.decay = "matrices"')
    assert 'works here: optimizer.decay = "all"' in error
    assert not Path("a.toml").exists()
    sets = ["--set", "optimizer.decay=all"]
    assert main(["export", "nano-zero3", "--to", "torchtitan", "--out", "a.toml", *sets]) == 0


def test_files_beside_need_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    plan = load_job("nano", ["mesh.pp=2", "pipeline.schedule=auto"]).plan
    text = plan.to_json().replace('"schedule": "auto"', '"schedule": "file"')
    Path("plan.json").write_text(text, encoding="utf-8")
    assert main(["export", "plan.json", "--to", "run.toml"]) == 2
    assert "error[export-needs-out]: schedule.csv must stand beside" in capsys.readouterr().err
    Path("out").mkdir()
    assert main(["export", "plan.json", "--to", "run.toml", "--out", "out/run.toml"]) == 0
    assert capsys.readouterr().out.splitlines() == ["out/run.toml", "out/schedule.csv"]
    assert load_job("out/run.toml").plan.layout.pipeline.rows == plan.layout.pipeline.rows


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "nano", "--to", "run.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["command"], found["to"]) == (1, "export", "run.toml")
    Path("again.toml").write_text(found["text"], encoding="utf-8")
    assert load_job("again.toml").plan == load_job("nano").plan


def test_a_folder_of_a_run_and_a_plan_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs/nano")
    run.mkdir(parents=True)
    (run / "plan.json").write_text(load_job("nano-zero3").plan.to_json(), encoding="utf-8")
    for source in ("runs/nano", "runs/nano/plan.json"):
        assert main(["compare", source, "nano-zero3", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["differences"] == []
        assert found["a"]["plan_hash"] == found["b"]["plan_hash"]


def test_a_run_keeps_what_stands_around_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    job = load_job("nano", ["checkpoint.every=7", "data.validation_fraction=0.2"])
    run = Path("runs/nano")
    run.mkdir(parents=True)
    (run / "plan.json").write_text(job.plan.to_json(), encoding="utf-8")
    (run / "run.toml").write_text(resolved_toml(job), encoding="utf-8")
    assert main(["export", "runs/nano", "--to", "run.toml"]) == 0
    Path("again.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_job("again.toml").content_hash() == job.content_hash()
    assert main(["export", "runs/nano", "--to", "run.toml", "--set", "mesh.dp_replicate=2"]) == 0
    assert "dp_replicate = 2" in capsys.readouterr().out
    (run / "run.toml").write_text("# Started from Python with a plan.\n", encoding="utf-8")
    assert main(["export", "runs/nano", "--to", "run.toml"]) == 0
    assert "[checkpoint]" not in capsys.readouterr().out


@pytest.mark.parametrize("source", ["metrics.json", "runs"])
def test_what_is_no_plan_is_refused(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("metrics.json").write_text("{}", encoding="utf-8")
    Path("runs").mkdir()
    assert main(["compare", source, "nano"]) == 2
    assert "error[plan-source]" in capsys.readouterr().err


def test_a_comparison_shows_settings_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "nano", "nano-zero3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["A: nano, 1 rank", "B: nano-zero3, 4 ranks"]
    assert "Other mathematics: 1 setting changes the numbers of a run." in lines
    assert any(line.split() == ["zero.stage", "0", "3", "layout"] for line in lines)
    assert any(line.split()[:3] == ["optimizer", "state", "5.88"] for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_a_comparison_of_equals_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "nano", "nano"]) == 0
    assert "The same mathematics and the same layout." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nosuch", "nosuch.json"])
def test_what_is_no_plan_is_told_what_may_be_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "nano", name]) == 2
    error = capsys.readouterr().err
    assert all(kind in error for kind in ("a run.toml", "a preset", "plan.json", "the folder of"))
    assert "Errno" not in error
