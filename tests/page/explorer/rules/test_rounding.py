"""Eight bits: rules with their arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.explorer.rules.examples import broken


@pytest.mark.parametrize(
    ("changes", "rule", "says"),
    [
        ({"precision": "fp8"}, "fp8-device", "A100 SXM 80 GB has no peak of fp8"),
        ({"precision": "fp8", "tp_overlap": "ring"}, "fp8-gathers-at-once", "ring with products"),
        ({"gather": "fp8"}, "fp8-gather-needs-codes", "no weight is multiplied in 8 bits"),
        (
            {"precision": "fp8 tensor", "gather": "fp8"},
            "fp8-gather-of-squares",
            "scales of squares",
        ),
        (
            {"precision": "fp8", "gather": "fp8", "parameter_offload": "host"},
            "fp8-gather-on-device",
            "not on the host",
        ),
        ({"gather": "int8", "zero": 2}, "int8-gather-of-all", "2 < 3"),
        ({"precision": "fp8", "gather": "int8"}, "int8-gather-rounds-once", "rounded twice"),
    ],
)
def test_a_rule_is_told_with_its_arithmetic(changes: dict[str, Any], rule: str, says: str) -> None:
    found = broken(**changes)
    assert rule in found
    assert says in found[rule]


def test_widths_that_are_no_whole_blocks_are_told() -> None:
    found = broken("qwen3-0.6b", "64xa100-80gb", precision="fp8", tp=16, dp_shard=4)
    assert "no multiple of 128" in found["fp8-block-divides"]
    found = broken("gpt2", gather="int8", tp=4, dp_shard=16, sequences=16)
    assert "heads x head_dim / tp = 768 / 4 is no multiple of 128" in found["int8-block-divides"]
