"""Published production choices: their file, and what the planner says of three small ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.known_answers import (
    FILE,
    MANY,
    Answer,
    Judged,
    judge,
    main,
    missed,
    read_answers,
    summary,
    text_of,
)
from echelon.planner.recommend.recommend import SURE, Recommendation, noise, recommend

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


@pytest.mark.slow
def test_small_rows_are_judged_beside_what_was_measured(judged: list[Judged]) -> None:
    for one in judged:
        assert one.problem == ""
        # A loss in one kernel, which held TinyLlama's memory down, is in no row.
        assert one.fits == (one.answer.name != "tinyllama-1b-16")
        assert one.measured_s is not None
        assert one.published_s >= one.fastest_s or not one.fits
        assert one.fastest_s <= one.ours_s
        assert one.regret <= one.regret_of_fastest
        text = text_of(one, terms=True)
        assert one.published in text
        assert one.ours in text
        assert one.fastest in text
        assert max(map(len, text.splitlines())) <= WIDTH
    assert f"{len(SMALL)} of {len(SMALL)}" in summary(judged)
    assert "beside the fastest plan: median" in summary(judged)


@pytest.mark.slow
def test_ours_is_what_the_planner_recommends(
    answers: dict[str, Answer], judged: list[Judged]
) -> None:
    found = recommend(answers["llama3-8b-nemo-8"].request())
    assert isinstance(found, Recommendation)
    assert found.first.fits >= SURE
    assert judged[0].ours_s == found.first.ranked.estimate.step_s
    assert judged[0].fastest_s <= judged[0].ours_s <= judged[0].fastest_s * (1.0 + noise())


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
    large = answers["llama3-405b-8k-16384"]
    assert large.measured_s(1.0, 6.5536e18) == pytest.approx(1.0)
    causal = answers["qwen3-235b-long-256"]
    rate = 256.0 * 389.0e12
    assert causal.measured_s(1.0, 1.5 * rate, rate) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_recipe_in_fp8_is_planned_in_fp8(answers: dict[str, Answer]) -> None:
    one = answers["llama3-8b-mlm-8"]
    assert one.request().matmul_dtype == "fp8"
    assert answers["llama3-8b-nemo-8"].request().matmul_dtype is None
    found = judge(one)
    half = judge(replace(one, cells={**one.cells, "precision": "bf16"}))
    assert found.published_s < 0.8 * half.published_s
    assert found.measured_s == half.measured_s


def test_both_plans_have_the_conditions_of_the_run(answers: dict[str, Answer]) -> None:
    pure = answers["qwen2.5-0.5b-llmq-4x4090"].request().software
    assert (pure.gradient_bytes, pure.state_bytes) == (2.0, 4.0)
    bloom = answers["bloom-176b-384"]
    assert bloom.request().software.fused_attention == 0.0
    assert answers["gpt-22b-8"].request().software.fused_attention == 1.0
    assert bloom.request().pins.values == {"cp": (1,)}
    pinned = bloom.request(*bloom.pins).pins.values
    assert (pinned["cp"], pinned["tp"], pinned["offload"]) == ((1,), (4,), (0,))
    offloaded = answers["qwen2.5-7b-llamafactory-4x4090"]
    assert offloaded.request(*offloaded.pins).pins.values["offload"] == (1,)


def test_kinds_of_runs_that_the_list_must_hold(answers: dict[str, Answer]) -> None:
    clusters = {one.cells["cluster"] for one in answers.values()}
    assert {"rtx4090", "rtx5090", "l40s", "a100-40gb", "h100"} <= clusters
    assert sum(one.cells["model"] == "mixtral-8x7b" for one in answers.values()) >= 2
    assert "falcon-40b-384" in answers


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
