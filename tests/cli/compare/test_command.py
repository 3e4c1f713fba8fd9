"""Two plans side by side: settings, bytes held and sent, and what is no plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_folder_of_a_run_and_a_plan_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs/nano")
    run.mkdir(parents=True)
    (run / "plan.json").write_text(load_job("nano-zero3").plan.to_json(), encoding="utf-8")
    for source in ("runs/nano", "runs/nano/plan.json"):
        assert main(["compare", source, "nano-zero3", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["differences"] == []
        assert found["a"]["plan_hash"] == found["b"]["plan_hash"]


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
