"""A walk of proofs asks `plan` first, proves the rest, and reports faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from tests.walks.plans import proof_walk
from tests.walks.plans.proof_walk import main


@pytest.mark.slow
def test_random_plans_are_proven_whole(tmp_path: Path) -> None:
    results = tmp_path / "walk.jsonl"
    assert main(["--count=2", "--seed=3", f"--results={results}"]) == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["outcome"] for line in lines].count("proven") == 2
    assert all(line["command"].startswith("echelon prove nano --set=") for line in lines)


@pytest.mark.one_in(3)
def test_a_refusal_after_plan_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **named: object) -> None:
        raise ConfigError([])

    monkeypatch.setattr(proof_walk, "prove", refused)
    assert main(["--count=1", "--seed=3", "--quick"]) == 1
    printed = capsys.readouterr().out
    assert "ConfigError" in printed
    assert "echelon prove nano" in printed
    assert "0 proven" in printed
    assert "1 fault" in printed
