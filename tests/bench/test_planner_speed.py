"""The bench of the planner counts what a search counts."""

from __future__ import annotations

import pytest

from bench import planner_speed
from bench.planner_speed import Case, computed_per_s, measure

CASE = Case(model="nano", cluster="8xh100", limit_s=1.0)


def test_a_case_is_searched_and_its_plans_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_speed, "ROUNDS", 1)
    monkeypatch.setattr(planner_speed, "COMPUTED", 2000)
    measured = measure(CASE)
    assert measured.seen >= measured.computed > 0
    assert measured.cpu_s > 0.0
    assert measured.row()[0] == "nano on 8xh100"
    assert computed_per_s(CASE) > 0.0
