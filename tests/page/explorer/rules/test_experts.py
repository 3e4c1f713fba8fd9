"""Experts and how rows travel: rules with their arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.explorer.rules.examples import broken


@pytest.mark.parametrize(
    ("changes", "rule", "says"),
    [
        ({"ep": 16}, "ep-divides-experts", "8 % 16 = 8"),
        ({"ep": 8, "expert_tp": 2}, "expert-tp-is-one-or-tp", "2 pieces, but tp = 8"),
        ({"ep": 4, "expert_tp": 8, "dp_shard": 2}, "ep-divides-ranks", "2 % 4 = 2"),
        ({"ep": 8, "dispatch": "two-hop"}, "two-hop-needs-nodes", "the 8 ranks"),
        ({"ep": 8, "chunks": 3}, "chunks-divide-tokens", "1024 % 3 = 1"),
        ({"chunks": 2}, "no-effect", "ep = 1"),
    ],
)
def test_a_rule_is_told_with_its_arithmetic(changes: dict[str, Any], rule: str, says: str) -> None:
    found = broken("mixtral-8x7b", **changes)
    assert rule in found
    assert says in found[rule]


def test_rows_hop_twice_over_several_ranks_of_several_nodes() -> None:
    hops: dict[str, Any] = {"ep": 8, "expert_tp": 2, "tp": 2, "dp_shard": 32, "sequences": 32}
    assert broken("mixtral-8x7b", **hops, dispatch="two-hop") == {}


def test_a_dense_model_has_no_experts() -> None:
    assert broken(expert_tp=8) == {"no-effect": "experts in 8 pieces, but the model has no experts"}
