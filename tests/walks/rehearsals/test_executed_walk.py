"""The walk that executes what it rehearses tells plans that are equal, refused, or differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.rehearsal.order import RankLog
from tests.rehearsal.engine_targets import Issued
from tests.walks.rehearsals import executed_walk
from tests.walks.rehearsals.executed_walk import difference, execute_random, main

ONE: Issued = ("dp", [0, 1], "all_reduce", 8, "float32", "gradients.bucket0")


def _draws(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    named = {key.replace("_", ".", 1): value for key, value in settings.items()}
    monkeypatch.setattr(executed_walk, "settings_of", lambda *_: named)


def test_the_first_difference_is_told() -> None:
    assert difference([ONE], [ONE]) == ""
    assert difference([ONE], []) == "1 operations in the rehearsal, and 0 on Gloo"
    other = (*ONE[:3], 16, *ONE[4:])
    assert difference([ONE, ONE], [ONE, other]).startswith("operation 1 is ('dp', [0, 1]")


def test_a_plan_that_is_refused_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    _draws(monkeypatch, mesh_tp=3)
    pool: Any = None
    found = execute_random(1, 0, pool, "/nowhere")
    assert (found["outcome"], found["ranks"]) == ("refused", 0)
    assert found["problem"]


def test_a_plan_is_executed_and_one_call_more_is_a_difference(
    monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool
) -> None:
    _draws(monkeypatch, mesh_pp=2, model_layers=4)
    found = execute_random(1, 0, rank_pool, "/nowhere")
    assert (found["outcome"], found["ranks"], found["problem"]) == ("equal", 2, "")
    assert found["operations"] > 10

    issue = RankLog.issue

    def twice(self: RankLog, one: Any) -> int:
        if one.kind == "send":
            issue(self, one)
        return issue(self, one)

    monkeypatch.setattr(RankLog, "issue", twice)
    found = execute_random(1, 0, rank_pool, "/nowhere")
    assert found["outcome"] == "differs"
    assert "in the rehearsal" in found["problem"]


def test_a_walk_goes_on_until_so_many_were_executed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def executed(seed: int, number: int, *_: object) -> dict[str, Any]:
        outcome = "refused" if number % 2 == 0 else "equal"
        found = {"seed": seed, "number": number, "flags": [], "outcome": outcome}
        return found | {"ranks": 2, "operations": 7, "problem": ""}

    monkeypatch.setattr(executed_walk, "execute_random", executed)
    results = tmp_path / "results.jsonl"
    assert main(["--plans", "2", "--results", str(results)]) == 0
    told = "2 plans executed: 2 equal, 0 differ; rules refused 2 more"
    assert told in capsys.readouterr().out

    def again(*_: object) -> dict[str, Any]:
        raise AssertionError("the results have it")

    monkeypatch.setattr(executed_walk, "execute_random", again)
    assert main(["--plans", "2", "--results", str(results)]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_sums_of_two_hops_keep_their_place_where_sums_have_no_copies(
    monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool
) -> None:
    # On Gloo every third sum ends the first. Under NCCL none had to, and a norm's second hop was
    # left waiting behind matrices that have none.
    mesh = {"mesh.dp_shard": 2, "mesh.tp": 2, "mesh.sequence_parallel": True, "zero.stage": 1}
    experts = {"model.experts.num_experts": 4, "model.experts.top_k": 2, "model.experts.ffn": 96}
    settings = mesh | experts | {"model.layers": 3, "optimizer.kind": "muon"}
    monkeypatch.setattr(executed_walk, "settings_of", lambda *_: settings)
    found = execute_random(1, 0, rank_pool, "/nowhere")
    assert (found["outcome"], found["ranks"], found["problem"]) == ("equal", 4, "")
