"""A walk over random plans: each is rehearsed, refused or a finding, with the line that does it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.config.load import load_job
from tests.walks.plans.random_settings import Settings, flags_of
from tests.walks.rehearsals import random_walk
from tests.walks.rehearsals.random_walk import (
    FEW_RANKS,
    MANY_RANKS,
    main,
    rehearse_random,
    work_of,
    world_sizes,
)

SMALL: Settings = {"mesh.tp": 2, "train.seed": 3, "optimizer.kind": "sgd"}

EXPERTS = ("model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.ffn=96")


def _draws(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.setattr(random_walk, "draw_settings", lambda *_: settings)


def test_plans_have_as_many_ranks_as_the_walk_may_have() -> None:
    assert (max(world_sizes(16)), max(world_sizes(8))) == (16, 8)
    assert set(world_sizes(4)) < set(FEW_RANKS)
    assert (min(world_sizes(1024)), max(world_sizes(1024))) == (16, 1024)
    assert list(world_sizes(300)) == [one for one in MANY_RANKS if one <= 300]


def test_a_plan_is_rehearsed_and_done_again_by_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _draws(monkeypatch, SMALL)
    found = rehearse_random(1, 0, 16, "/nowhere")
    assert (found["outcome"], found["world_size"], found["problem"]) == ("holds", 2, "")
    assert found["rehearsed"] >= 1
    assert abs(found["memory_error"]) < 0.1
    words = shlex.split(found["command"])
    assert words[:3] == ["echelon", "rehearse", "nano"]
    assert load_job("nano", words[4::2]).plan.mesh.tp == 2


def test_a_plan_that_is_too_much_work_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([SMALL | {"mesh.dp_replicate": 2}, SMALL])
    monkeypatch.setattr(random_walk, "draw_settings", lambda *_: next(drawn))
    monkeypatch.setattr(random_walk, "MOST_WORK", work_of(load_job("nano", flags_of(SMALL)).plan))
    found = rehearse_random(1, 0, 16, "/nowhere")
    assert (found["outcome"], found["world_size"]) == ("holds", 2)
    assert "mesh.tp=2" in found["command"]


def test_work_grows_with_ranks_of_a_kind_of_their_own_and_with_matrices() -> None:
    nano, deep, pipeline, experts = (
        work_of(load_job("nano", flags).plan)
        for flags in ((), ("model.layers=8",), ("mesh.pp=2", "model.layers=8"), EXPERTS)
    )
    assert nano < deep < pipeline
    assert nano < experts


def test_a_rule_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _draws(monkeypatch, SMALL | {"mesh.tp": 3})
    found = rehearse_random(1, 0, 16, "/nowhere")
    assert (found["outcome"], found["world_size"]) == ("refused", 0)
    assert found["rules"]


def test_other_bytes_than_the_formulas_and_tracebacks_are_findings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _draws(monkeypatch, SMALL)
    right = random_walk.rehearse

    def doubled(plan: Any) -> Any:
        done = right(plan)
        more = {rank: {"tp": 2 * sent["tp"]} for rank, sent in done.sent.items()}
        return replace(done, sent=more)

    monkeypatch.setattr(random_walk, "rehearse", doubled)
    results = tmp_path / "new" / "results.jsonl"
    arguments = ["--plans", "1", "--results", str(results)]
    assert main(arguments) == 1
    assert "by the formulas" in capsys.readouterr().out

    def raises(plan: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(random_walk, "rehearse", raises)
    # What the results have is not done again.
    assert main(arguments) == 1
    assert "by the formulas" in capsys.readouterr().out
    assert main(["--plans", "1"]) == 1
    said = capsys.readouterr().out
    assert "ValueError: a bug" in said
    assert "1 plans: 0 hold, 1 failed; rules refused 0 more" in said


def test_a_walk_goes_on_until_so_many_were_rehearsed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = iter([SMALL | {"mesh.tp": 3}, SMALL, SMALL | {"mesh.tp": 3}, SMALL])
    monkeypatch.setattr(random_walk, "draw_settings", lambda *_: next(drawn))
    results = tmp_path / "results.jsonl"
    assert main(["--plans", "1", "--results", str(results)]) == 0
    assert "1 plans: 1 hold, 0 failed; rules refused 1 more" in capsys.readouterr().out
    # It goes on after what the results have, refused plans included.
    assert main(["--plans", "2", "--results", str(results)]) == 0
    assert "2 plans: 2 hold, 0 failed; rules refused 2 more" in capsys.readouterr().out
    assert len(results.read_text().splitlines()) == 4


def test_a_walk_that_rules_refuse_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_walk, "REFUSED_IN_A_ROW", 3)
    _draws(monkeypatch, SMALL | {"mesh.tp": 3})
    assert main(["--plans", "1"]) == 1


@pytest.mark.quick("16")
@pytest.mark.parametrize("ranks", [16, 256])
def test_plans_of_many_ranks_are_drawn_rehearsed_or_refused(ranks: int, tmp_path: Path) -> None:
    found = [rehearse_random(3, number, ranks, str(tmp_path)) for number in (0,)]
    assert all(one["outcome"] in ("holds", "refused") for one in found), found
