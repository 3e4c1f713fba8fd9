"""`echelon export` prints or writes a plan for a tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job


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
    assert main(["import", "ds.json", "--out", "run.toml"]) == 0
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
