"""A walk over random plans: each is proven, refused or a finding, and a line that does it again."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from echelon.proof.matrix.random_plans import (
    RandomPlanResult,
    Settings,
    flags_of,
    main,
    result_of,
    settings_of,
    summary,
    walk_plan,
)

from echelon.core.version import source_hash
from echelon.launch.local.pool import RankPool
from echelon.proof.matrix import random_plans

SMALL: Settings = {"mesh.tp": 2, "train.seed": 3, "optimizer.kind": "sgd", "model.tied": True}
RESULT = RandomPlanResult(
    seed=5,
    number=0,
    code="c",
    command="echelon prove nano",
    world_size=2,
    outcome="proven",
    rules=(),
    seconds=2.0,
    problem="",
)


def drawing(patch: pytest.MonkeyPatch, settings: Settings) -> None:
    """Let every draw be these settings."""
    patch.setattr(random_plans, "draw_settings", lambda random, offload_dir: settings)


def no_ranks(target: str, argument: object, world_size: int, /, **_: object) -> object:
    """Stand for ranks that end in a traceback."""
    raise RuntimeError("a rank fell over")


@pytest.mark.slow
def test_a_line_does_a_plan_again(monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool) -> None:
    drawing(monkeypatch, SMALL)
    found = walk_plan(5, 0, rank_pool.run, offload_dir="/nowhere", code="c")
    assert (found.outcome, found.world_size, found.rules, found.problem) == ("proven", 2, (), "")
    assert shlex.split(found.command) == [
        *("echelon", "prove", "nano", "--set", "mesh.tp=2", "--set", "train.seed=3"),
        *("--set", "optimizer.kind=sgd", "--set", "model.tied=true"),
    ]
    assert result_of(json.loads(json.dumps(asdict(found)))) == found


def test_a_plan_that_a_rule_refuses_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, {"mesh.tp": 3})
    found = walk_plan(5, 0, no_ranks, offload_dir="/nowhere", code="c")
    assert (found.outcome, found.world_size, found.problem) == ("refused", 0, "")
    assert "tp-divides-kv-heads" in found.rules


def test_ranks_that_fall_over_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, SMALL)
    found = walk_plan(5, 0, no_ranks, offload_dir="/nowhere", code="c")
    assert found.outcome == "failed"
    assert "RuntimeError: a rank fell over" in found.problem


def test_late_completion_is_asked_for_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def told(target: str, argument: object, world_size: int, /, **_: object) -> object:
        assert isinstance(argument, dict)
        asked.append(argument["late"])
        raise RuntimeError("a rank fell over")

    drawing(monkeypatch, SMALL)
    found = walk_plan(5, 0, told, offload_dir="/nowhere", code="c", late=True)
    assert asked == [True]
    assert found.late
    assert found.command.endswith(" --late")


def test_settings_depend_on_seed_and_number_alone() -> None:
    assert settings_of(1, 7, "/a") == settings_of(1, 7, "/a") != settings_of(1, 8, "/a")
    assert flags_of({"a": True, "b": 0.5, "c": "x"}) == ["a=true", "b=0.5", "c=x"]


def test_a_walk_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing(monkeypatch, {"mesh.tp": 3})
    results = tmp_path / "lines"
    code = source_hash()[:16]
    failed = replace(RESULT, code=code, outcome="failed", problem="wrong")
    results.write_text(json.dumps(asdict(failed)) + "\n")

    assert main(["--plans", "2", "--seed", "5", "--results", str(results)]) == 1
    told = capsys.readouterr().out
    assert "1/2  failed" in told
    assert "2/2  refused   tp-divides-" in told
    assert "2 plans: 0 proven, 1 refused by rules, 1 failed" in told
    assert len(results.read_text().splitlines()) == 2


def test_the_figures() -> None:
    refused = replace(RESULT, outcome="refused", rules=("no-effect",), seconds=0.0)
    proven = [replace(RESULT, seconds=float(seconds)) for seconds in range(1, 12)]
    lines = summary([refused, *proven]).splitlines()
    assert lines[0] == "12 plans: 11 proven, 1 refused by rules, 0 failed"
    assert lines[1] == "seconds of a proof: median 6.0, nine of ten within 10.8"
    assert lines[2].split() == ["1", "no-effect"]
