"""`--html`: what its value ends in says whether it is a page or figures, alike in each command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.cli.report_files import ReportFiles
from echelon.core.errors import ConfigError
from tests.page.test_run import steps, written

COMMANDS = {
    "plan": ["plan", "nano"],
    "search": ["plan", "llama3-8b", "--cluster", "8xh100"],
    "rehearse": ["rehearse", "nano"],
    "prove": ["prove", "nano"],
    "compare": ["compare", "nano", "nano-zero3"],
    "observe": ["observe", "RUN"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_name_does_not_say_is_refused_before_any_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("there")
    os.mkdir("there.html")
    for value, rule, instead in (
        ("plan.pdf", "bad-argument", "plan.html"),
        ("there", "never-overwrite", "there-2"),
        ("there.html", "never-overwrite", ".html"),
        ("nowhere/of", "cannot-write", ""),
    ):
        flag = "--html" if value.endswith(".html") else "--figures"
        assert main([*COMMANDS[name], flag, value]) == 2
        told = capsys.readouterr()
        assert f"error[{rule}]" in told.err
        assert instead in told.err
        assert "rehearsing" not in told.err
        assert "proving" not in told.err
        assert told.out == ""
    assert sorted(os.listdir()) == ["there", "there.html"]
    assert os.listdir("there") == []


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("plan", ["memory.svg", "step.svg"]),
        ("compare", ["part-held.svg", "part-seconds.svg", "part-sent.svg", "part-step.svg"]),
        ("observe", ["loss.svg", "norm.svg", "rate.svg", "seconds.svg"]),
    ],
)
def test_a_folder_gets_the_figures_and_a_file_the_page(
    name: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "runs", steps(3)) if name == "observe" else tmp_path
    words = [str(run) if word == "RUN" else word for word in COMMANDS[name]]
    figures, page = tmp_path / "figures", tmp_path / "page.html"
    assert main([*words, "--html", f"{figures}/"]) == 0
    found = sorted(path.name for path in figures.iterdir())
    assert [one for one in files if one not in found] == []
    told = capsys.readouterr().err
    assert [one for one in found if f"written: {figures / one}" not in told] == []
    assert main([*words, "--figures", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main([*words, "--html", str(tmp_path / "of.svg")]) == 0
    beside = sorted(path.name for path in tmp_path.glob("of-*.svg"))
    assert beside == [f"of-{one}" for one in found]


def test_without_the_flag_nothing_is_written() -> None:
    assert ReportFiles.at(None) is None


def test_a_name_with_a_dot_is_a_folder_and_letters_may_be_large(tmp_path: Path) -> None:
    found = ReportFiles.at(tmp_path / "v1.2")
    assert found is not None
    assert not found.is_page
    page = ReportFiles.at(tmp_path / "PLAN.HTML")
    assert page is not None
    assert page.is_page
    with pytest.raises(ConfigError, match="its name does not say"):
        ReportFiles.at(tmp_path / "plan.JSON")
