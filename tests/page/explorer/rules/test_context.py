"""Kinds of context and recompute: rules with their arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.explorer.rules.examples import broken


@pytest.mark.parametrize(
    ("changes", "rule", "says"),
    [
        ({"context": "striped"}, "no-effect", "cp = 1"),
        (
            {"cp": 4, "dp_shard": 2, "context": "ulysses-ring", "ulysses": 3},
            "ulysses-divides-cp",
            "4 % 3 = 1",
        ),
        (
            {"cp": 8, "dp_shard": 1, "context": "ulysses"},
            "ulysses-divides-heads",
            "32 / 8 = 4 (4 % 8 = 4)",
        ),
        ({"cp": 2, "dp_shard": 4, "ulysses": 2}, "no-effect", "ring exchanges no heads"),
        ({"every": 2}, "no-effect", "every 2 counts blocks of full recompute"),
        ({"operators": "norm"}, "no-effect", "nothing runs again"),
        ({"recompute": "full", "operators": "norm"}, "no-effect", "every block runs again whole"),
    ],
)
def test_a_rule_is_told_with_its_arithmetic(changes: dict[str, Any], rule: str, says: str) -> None:
    found = broken(**changes)
    assert list(found) == [rule]
    assert says in found[rule]


def test_operators_that_a_model_has_not_are_told() -> None:
    found = broken("mixtral-8x7b", recompute="selective", operators="mlp")
    assert "no block has an MLP that every token meets alone" in found["no-effect"]
    found = broken("deepseek-v3", recompute="selective", operators="attention")
    assert "latent attention does not run again by itself" in found["no-effect"]
