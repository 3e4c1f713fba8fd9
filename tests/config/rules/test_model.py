"""Positions that turn: their scaling has a middle."""

from __future__ import annotations

from tests.config.problems import problems_of


def test_rotary_scaling_has_a_middle() -> None:
    found = problems_of("llama3.1-405b", ["model.rope_scaling.low_frequency_factor=4"])
    assert list(found) == ["rope-scaling-order"]
