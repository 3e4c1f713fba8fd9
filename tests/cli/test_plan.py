"""`echelon plan` shows the numbers of `cost/`, and refuses by every rule at once."""

from __future__ import annotations

import json

import pytest

from echelon.cli.main import main
from echelon.cli.plan_report import groups, plan_text, runs_of_alike, stage_rows
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes_held import bytes_held
from echelon.cost.bytes_sent import bytes_sent

SPLIT = ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2")
FLAGS = [word for setting in SPLIT for word in ("--set", setting)]


def nano(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def test_json_holds_what_cost_says_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", "--json", *FLAGS]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps(result["plan"]))
    assert plan == nano(*SPLIT)
    assert result["hash"] == plan.content_hash()
    shown: set[int] = set()
    for row in result["stages"]:
        for rank in row["ranks"]:
            shown.add(rank)
            held = {term.name: term.bytes for term in bytes_held(plan, rank)}
            sent = {(term.axis, term.name): term.bytes for term in bytes_sent(plan, rank)}
            assert row["held_bytes"] == held
            assert {(t["axis"], t["name"]): t["bytes"] for t in row["sent_bytes_per_step"]} == sent
    assert shown == set(range(8))
    assert result["groups"]["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert result["groups"]["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert result["groups"]["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert result["held_bytes_fit"] is True


def test_text_shows_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", *FLAGS, "--set", "mesh.sequence_parallel=true"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    for part in (
        "8 = pp 2 x dp_replicate 2 x tp 2, sequence parallel",
        "optimizer moments",
        "[0 1]  [2 3]  [4 5]  [6 7]",
        "2 (n-1)/n x parameters of the rank x s",
        "20.0 % of the step is bubble",
        "stage 1  ......F0----B0",
    ):
        assert part in output.out
    assert max(map(len, output.out.splitlines())) <= 120


def test_one_rank_talks_to_nobody() -> None:
    plan = nano()
    assert groups(plan) == {}
    assert "sends per step" not in plan_text(plan)
    assert "bubble" not in plan_text(plan)


def test_stages_that_are_alike_share_a_row() -> None:
    plan = nano("model.layers=8", "mesh.pp=4", 'model.name="deeper"')
    runs = runs_of_alike(stage_rows(plan))
    # A tied embedding makes both ends of the model differ from the middle.
    assert [[row.stage for row in run] for run in runs] == [[0], [1, 2], [3]]
    text = plan_text(plan)
    assert "1-2" in text
    assert "2-5" in text


def test_a_plan_of_many_ranks_stays_readable() -> None:
    settings = (
        "cluster.preset=1024xh100",
        "mesh.pp=16",
        "mesh.tp=8",
        "mesh.dp_replicate=8",
        "batch.global_sequences=256",
        "batch.sequence_length=8192",
    )
    lines = plan_text(load_job("llama3.1-405b", settings).plan).splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 130
    assert any("(64 of 64 between nodes)" in line for line in lines)


def test_state_that_does_not_fit_is_said() -> None:
    plan = load_job("llama3-8b").plan
    assert "THIS DOES NOT FIT" in plan_text(plan)
    assert "THIS DOES NOT FIT" not in plan_text(nano())


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nano", "--set", "mesh.tp=3", "--set", "mesh.pp=9"]) == 2
    error = capsys.readouterr().err
    assert {"tp-divides-heads", "layers-fill-stages", "fits-cluster"} <= {
        line.split("[")[1].split("]")[0] for line in error.splitlines() if line.startswith("error[")
    }


def test_a_misspelt_setting_is_told_with_what_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "nano", "--set", "mesh.dp_replicat=2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[unknown-key]")
    assert "mesh.dp_replicate" in error
