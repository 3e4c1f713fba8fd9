"""Experts: as many as a token meets, and layers that have them."""

from __future__ import annotations

import pytest

from tests.config.problems import problems_of


@pytest.mark.parametrize(
    "sets",
    [
        ["model.experts.top_k=9"],
        ["model.experts.first_dense_layers=32"],
    ],
)
def test_there_are_experts_enough(sets: list[str]) -> None:
    assert list(problems_of("mixtral-8x7b", sets)) == ["experts-enough"]
