"""What guides say to the controls is what they say to the plan of their run file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.handbook.guides.practices import advise
from echelon.handbook.guides.situation import PlanSituation
from echelon.handbook.guides.trees import TREES
from echelon.page.explorer.controls import run_text
from tests.page.explorer.random_controls import legal_settings, tables
from web.formulas.guides import guide_ways


def agree_on_ways(tmp_path: Path, seed: int, count: int) -> Counter[str]:
    """Compare the ways of random settings; return how often each advice came up."""
    seen = Counter[str]()
    for settings in legal_settings(seed, count):
        path = tmp_path / "run.toml"
        path.write_text(run_text(*settings), encoding="utf-8")
        plan = load_job(path).plan
        advised = advise(PlanSituation.of(plan))
        found = guide_ways(tables(), *settings)
        assert [one.id for one in found] == [one.id for one in advised.advice]
        for way, (advice, differs) in zip(found, advised.against(plan), strict=True):
            steps = [(node.question.text, answer.yes, answer.why) for node, answer in advice.steps]
            assert [(one.question, one.yes, one.why) for one in way.steps] == steps
            assert (way.source, way.strategy) == (advice.source, advice.strategy.name)
            assert (way.says, way.differs) == (advice.strategy.says(), differs)
            assert way.note.endswith(advice.note or (advice.tree.ours if advice.tree else ""))
            seen[f"{way.id}: {way.strategy}"] += 1
    return seen


def test_ways_through_trees_and_rows_of_sizes_are_those_of_the_plan(tmp_path: Path) -> None:
    seen = agree_on_ways(tmp_path, seed=41, count=12)
    assert {tree.id for tree in TREES} <= {name.partition(":")[0] for name in seen}
    assert len(seen) > len(TREES)


@pytest.mark.slow
def test_ways_are_those_of_many_plans(tmp_path: Path) -> None:
    seen = agree_on_ways(tmp_path, seed=42, count=200)
    assert len(seen) >= 15
    assert any(name.startswith("size-") for name in seen)
