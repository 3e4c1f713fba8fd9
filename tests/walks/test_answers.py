"""Recordings of answers: what differs is told, and what differs each time is not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.walks.answers import Question, ask, asked, main, stable

PLAN = Question(kind="splits", name="nano", words=("plan", "nano"))


def test_an_answer_has_the_command_its_code_and_what_it_printed() -> None:
    text = ask(PLAN).text(PLAN)
    assert text.startswith("$ echelon plan nano\nexit 0\n\n--- stdout\nplan     nano")
    assert ask(PLAN).text(PLAN) == text


def test_a_file_that_is_written_belongs_to_the_answer() -> None:
    question = Question(kind="files", name="init", words=("init",))
    assert "--- file run.toml\n# A run:" in ask(question).text(question)


def test_seconds_of_a_search_are_left_out_and_those_of_a_step_stay() -> None:
    assert stable("searched  9 legal plans in 0.5 s") == "searched  9 legal plans in SECONDS"
    assert stable("step  6.433 s") == "step  6.433 s"


def test_recordings_that_differ_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for folder, text in (("a", "one\n"), ("b", "two\n")):
        (tmp_path / folder / "plans").mkdir(parents=True)
        (tmp_path / folder / "plans" / "nano.txt").write_text(text, encoding="utf-8")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    printed = capsys.readouterr().out
    assert "== plans: 1 of 1 differ" in printed
    assert "-one\n+two" in printed


def test_each_question_of_the_file_is_a_command() -> None:
    kinds = asked()["kinds"]
    assert set(asked()["as_json"]) <= set(kinds)
    assert all(shlex.split(one) or name == "echelon" for name, one in kinds["help"].items())
    assert sum(len(kinds[kind]) for kind in ("plans", "shown", "splits")) >= 200
