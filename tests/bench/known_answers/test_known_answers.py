"""Published production choices: their file, and what the planner says of three small ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.known_answers.__main__ import main
from bench.known_answers.answers import FILE, Answer, read_answers
from bench.known_answers.regret import MANY, Judged, judge, missed, summary, text_of

LEAST_ROWS = 25
SMALL = ("llama3-8b-nemo-8", "gpt-22b-8", "tinyllama-1b-16")
WIDTH = 110


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """Return the rows of the file by name."""
    return {one.name: one for one in read_answers()}


@pytest.fixture(scope="module")
def judged(answers: dict[str, Answer]) -> list[Judged]:
    """Return what the planner says of the small rows."""
    return [judge(answers[name]) for name in SMALL]


def test_every_row_has_a_source_and_degrees_that_make_its_devices(
    answers: dict[str, Answer],
) -> None:
    assert len(answers) >= LEAST_ROWS
    for one in answers.values():
        assert one.cells["source"], one.name
        assert one.cells["checked"], one.name
        inner = int(one.cells["tp"]) * int(one.cells["cp"]) * int(one.cells["pp"])
        assert int(one.cells["devices"]) % inner == 0, one.name


def test_small_rows_are_judged_beside_what_was_measured(judged: list[Judged]) -> None:
    for one in judged:
        assert one.problem == ""
        # A loss in one kernel, which held TinyLlama's memory down, is in no row.
        assert one.fits == (one.answer.name != "tinyllama-1b-16")
        assert one.measured_s is not None
        assert one.published_s >= one.ours_s or not one.fits
        text = text_of(one, terms=True)
        assert one.published in text
        assert one.ours in text
        assert max(map(len, text.splitlines())) <= WIDTH
    assert f"{len(SMALL)} of {len(SMALL)}" in summary(judged)


def test_a_published_layout_is_kept(judged: list[Judged]) -> None:
    assert "cp2" in judged[0].published
    assert "tp8" in judged[1].published
    assert "b8" in judged[2].published


def test_a_large_regret_needs_a_reason(judged: list[Judged]) -> None:
    slow = replace(judged[0], published_s=(1.0 + 2.0 * MANY) * judged[0].ours_s)
    assert slow.unexplained
    assert "none is named" in text_of(slow)
    assert "without a named reason: llama3-8b-nemo-8" in summary([slow])
    assert missed([slow])
    cells = {**slow.answer.cells, "reason": "network: one switch"}
    named = replace(slow, answer=replace(slow.answer, cells=cells))
    assert not named.unexplained
    assert "network: one switch" in text_of(named)


def test_a_rate_becomes_the_seconds_of_a_step(answers: dict[str, Answer]) -> None:
    one = answers["llama3-8b-mlm-8"]
    tokens = 8192.0 * 128.0
    assert one.measured_s(tokens, 0.0) == pytest.approx(tokens / 8.0 / 13812.0)
    assert not one.comparable
    large = answers["llama3-405b-8k-16384"]
    assert large.measured_s(1.0, 6.5536e18) == pytest.approx(1.0)
    causal = answers["qwen3-235b-long-256"]
    rate = 256.0 * 389.0e12
    assert causal.measured_s(1.0, 1.5 * rate, rate) == pytest.approx(1.0)


def test_a_row_that_no_rule_allows_is_told(answers: dict[str, Answer]) -> None:
    one = answers["gpt-22b-8"]
    wrong = replace(one, cells={**one.cells, "cluster": "abacus"})
    found = judge(wrong)
    assert found.problem
    assert "not judged" in text_of(found)
    assert missed([found])


def test_a_file_with_a_name_twice_or_a_wrong_unit_is_refused(tmp_path: Path) -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    twice = tmp_path / "twice.csv"
    twice.write_text("\n".join([*lines[:2], lines[1]]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="more than one row"):
        read_answers(twice)
    unit = tmp_path / "unit.csv"
    unit.write_text("\n".join(lines[:2]).replace(",tflops,", ",furlongs,"), encoding="utf-8")
    with pytest.raises(ValueError, match="none of"):
        read_answers(unit)


def test_a_name_that_is_no_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "llama9"]) == 2
    assert "llama3-8b-nemo-8" in capsys.readouterr().err
