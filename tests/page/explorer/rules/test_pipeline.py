"""Schedules and stages: rules with their arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.explorer.rules.examples import broken


@pytest.mark.parametrize(
    ("changes", "rule", "says"),
    [
        ({"virtual": 2}, "schedule-stages-per-rank", "2 stages for 1 ranks"),
        ({"pp": 40, "dp_shard": 1, "tp": 1}, "layers-fill-stages", "40 x 1 = 40 stages"),
        (
            {"pp": 3, "dp_shard": 2, "schedule": "dualpipe", "sequences": 16},
            "schedule-even-ranks",
            "pp = 3 is odd",
        ),
        (
            {"pp": 2, "dp_shard": 4, "schedule": "dualpipe", "sequences": 4},
            "schedule-needs-microbatches",
            "a step has 1",
        ),
    ],
)
def test_a_rule_is_told_with_its_arithmetic(changes: dict[str, Any], rule: str, says: str) -> None:
    found = broken(**changes)
    assert rule in found
    assert says in found[rule]
