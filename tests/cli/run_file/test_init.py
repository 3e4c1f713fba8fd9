"""`echelon init` writes a file that runs as the preset does, and never over another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "run.toml"
    assert main(["init", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    return path


def test_the_file_runs_as_its_preset_does(written: Path) -> None:
    mine, preset = load_job(written).plan, load_job("nano").plan
    assert mine.same_mathematics(preset)
    assert mine.layout == preset.layout


def test_what_stands_behind_each_mark_is_what_holds_anyway(written: Path) -> None:
    text = written.read_text()
    marked = [line for line in text.splitlines() if line.startswith("# ") and " = " in line]
    assert len(marked) > 25
    written.write_text(text.replace("\n# ", "\n"))
    head = written.read_text().index("extends")
    written.write_text(written.read_text()[head:])
    assert (
        load_job(written).content_hash() == load_job("nano", ["train.run_name=run"]).content_hash()
    )


def test_a_file_that_exists_is_left_as_it_is(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written.write_text("mine")
    assert main(["init", "--out", str(written)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[never-overwrite]")
    assert f"works here: {written.with_stem('run-2')}" in error
    assert written.read_text() == "mine"


def test_a_folder_is_no_file_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--out", "."]) == 2
    assert "works here: run.toml " in capsys.readouterr().err


def test_a_folder_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--out", str(tmp_path / "absent" / "run.toml")]) == 2
    assert capsys.readouterr().err.startswith("error[cannot-write]")


@pytest.mark.parametrize("name", ["run.yaml", "run"])
def test_a_run_file_is_named_as_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--out", str(tmp_path / name)]) == 2
    assert str(tmp_path / "run.toml") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_preset_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", "--out", str(path), "--extends", "nanno"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[unknown-preset]")
    assert "nano" in error
    assert not path.exists()


def test_json_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.toml"
    assert main(["init", "--out", str(path), "--extends", "gpt2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["file"], result["extends"]) == (str(path), "gpt2")
    assert load_job(path).plan.model.name == "gpt2"
