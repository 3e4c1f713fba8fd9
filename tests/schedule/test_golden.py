"""What tutorials say about pipelines, each fact given by the builders and the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.schedule.golden import PIPELINES, Fact


def agree(ours: Any, correct: Any) -> bool:
    """Return whether two values agree, to the four digits to which shares are rounded."""
    if isinstance(correct, list):
        return all(agree(*pair) for pair in zip(ours, correct, strict=True))
    return ours == correct if isinstance(correct, int) else abs(ours - correct) <= 5.1e-5


@pytest.mark.parametrize("fact", PIPELINES, ids=lambda fact: fact.id)
def test_builders_and_simulator_give_the_fact(fact: Fact) -> None:
    assert agree(fact.ours(), fact.correct), f"{fact.claim}: {fact.ours()}, not {fact.correct}"


def test_no_fact_is_missing_or_told_twice() -> None:
    ids = [fact.id for fact in PIPELINES]
    expected = [f"002-{n}" for n in (20, 21, 22, 23, 24, 25, 26, 29)]
    expected += [f"003-{n}" for n in (36, 37, 38, 39, 40, 74)]
    assert sorted(ids) == sorted([*expected, "X-01"])
