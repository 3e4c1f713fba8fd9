"""`--out`: what its value ends in says what is written, alike in each command that has a page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.cli.flags import (
    CELLS,
    DRAWING,
    FIGURE_FOLDER,
    PAGE,
    PLAN,
    PNG_FIGURES,
    REPORT,
    RUN_FILE,
    TRACES,
    WrittenFiles,
)
from echelon.cli.main import main
from echelon.core.errors import ConfigError
from tests.page.documents.test_run import steps, written

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
        ("there", "bad-argument", "there-2/"),
        ("there/", "never-overwrite", "there-2/"),
        ("there.html", "never-overwrite", ".html"),
        ("nowhere/of/", "cannot-write", ""),
    ):
        assert main([*COMMANDS[name], "--out", value]) == 2
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
    assert main([*words, "--out", f"{figures}/", "--out", str(page)]) == 0
    found = sorted(path.name for path in figures.iterdir())
    assert [one for one in files if one not in found] == []
    told = capsys.readouterr().err
    assert [one for one in found if f"written: {figures / one}" not in told] == []
    assert f"written: {page}" in told
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main([*words, "--out", str(tmp_path / "of.svg")]) == 0
    beside = sorted(path.name for path in tmp_path.glob("of-*.svg"))
    assert beside == [f"of-{one}" for one in found]


def test_without_the_flag_nothing_is_written() -> None:
    found = WrittenFiles.read((), REPORT)
    assert not found.paths
    assert not found.has_report


def test_the_ending_says_the_form_in_large_letters_too(tmp_path: Path) -> None:
    names = [f"{tmp_path}/{name}" for name in ("v1.2/", "PLAN.HTML", "a.toml", "a.json", "a.png")]
    found = WrittenFiles.read(names, (RUN_FILE, PLAN, *REPORT))
    forms = (FIGURE_FOLDER, PAGE, RUN_FILE, PLAN, PNG_FIGURES)
    assert found.paths == {form: Path(name) for form, name in zip(forms, names, strict=True)}
    assert found.has_report
    assert found.names(FIGURE_FOLDER, PLAN) == (f"--out {names[0]}", f"--out {names[3]}")
    assert not WrittenFiles.read([f"{tmp_path}/a.svg"], (DRAWING, CELLS)).has_report


def test_every_name_that_will_not_do_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "there.toml").touch()
    names = ["a.yaml", "there.toml", "b.toml", "c.html", "d"]
    with pytest.raises(ConfigError) as caught:
        WrittenFiles.read([str(tmp_path / name) for name in names], (RUN_FILE, PAGE))
    rules = ("bad-argument", "never-overwrite", "bad-argument", "bad-argument")
    ending, taken, twice, none = caught.value.problems
    assert caught.value.rules == rules
    assert ending.suggestions == tuple(f"--out {tmp_path}/a{end}" for end in (".toml", ".html"))
    assert taken.suggestions == (f"--out {tmp_path}/there-2.toml",)
    assert "ask both for a run file (TOML)" in twice.message
    assert none.suggestions == tuple(f"--out {tmp_path}/d{end}" for end in (".toml", ".html"))
    assert sorted(os.listdir(tmp_path)) == ["there.toml"]


def test_traces_are_files_that_begin_alike(tmp_path: Path) -> None:
    name = f"{tmp_path}/traces/rank.json.gz"
    found = WrittenFiles.read([name, f"{tmp_path}/all.json"], (PLAN, TRACES))
    assert found.get(TRACES) == Path(name)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/rank-0000.json.gz").touch()
    with pytest.raises(ConfigError) as caught:
        WrittenFiles.read([name], (TRACES,))
    assert caught.value.rules == ("never-overwrite",)
    assert caught.value.problems[0].suggestions == (f"--out {tmp_path}/traces/rank2.json.gz",)
