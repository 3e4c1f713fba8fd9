"""The page of a plan and its object hold the numbers of cost/."""

from __future__ import annotations

import json

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis
from echelon.planner.report.report import plan_text
from echelon.planner.report.sent import groups

SPLIT = ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2")


FLAGS = [word for setting in SPLIT for word in ("--set", setting)]


def nano(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def _joined(text: str) -> str:
    """Return a page with its lines in one, as the sentences were before they were fitted."""
    return " ".join(text.split())


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
            held = {(term.name, term.pool): term.bytes for term in bytes_held(plan, rank)}
            sent = {(term.axis, term.name): term.bytes for term in bytes_sent(plan, rank)}
            assert {(t["name"], t["pool"]): t["bytes"] for t in row["held"]} == held
            assert row["sent_bytes_by_axis"] == bytes_sent_by_axis(plan, rank)
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
        "optimizer",
        "[0 1]  [2 3]  [4 5]  [6 7]",
        "2 (n-1)/n G s",
        "Stages: 2 2 blocks, slowest rank 1.09x of the mean (the even split), by modelled times.",
        "and 20.0 % if all stages took equally long.",
        "Most activations on each rank, in microbatches: 2 1.",
        "A pipeline sends 8 messages of 65.54 kB in a step for each tensor rank.",
        # Of the last stage the head is in backward alone.
        "stage 1  .....F0--B0=========F1--B1",
    ):
        assert part in output.out or part in _joined(output.out)
    assert max(map(len, output.out.splitlines())) <= 80


def test_one_rank_talks_to_nobody() -> None:
    plan = nano()
    assert groups(plan) == {}
    assert "sends per step" not in plan_text(plan)
    assert "bubble" not in plan_text(plan)


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
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 80
    assert any("(64 of 64 between nodes)" in line for line in lines)
