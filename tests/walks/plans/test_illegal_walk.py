"""A plan that breaks a rule is never proven as one that its small model made legal."""

from __future__ import annotations

import pytest

from tests.walks.plans.illegal_walk import illegal_plans, is_mended, main
from tests.walks.plans.test_random_families import NAMES


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_no_broken_rule_of_a_family_is_mended(family: str) -> None:
    broken = list(illegal_plans(family, 12))
    assert len(broken) > 3
    assert [(plan.rule, plan.change) for plan in broken if is_mended(plan)] == []


def test_the_walk_tells_what_it_met(capsys: pytest.CaptureFixture[str]) -> None:
    main(1)
    text = capsys.readouterr().out
    assert "plans with one broken rule, 0 mended" in text
