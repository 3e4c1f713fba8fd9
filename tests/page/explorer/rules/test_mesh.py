"""Tensor ranks, data ranks, servers and devices: rules with their arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.explorer.rules.examples import broken

PLAIN_RUN = {"dp_shard": 1, "dp_replicate": 8, "tp": 1, "zero": 0, "sequence_parallel": False}


@pytest.mark.parametrize(
    ("changes", "rule", "says"),
    [
        ({"tp": 16, "dp_shard": 4}, "tp-divides-kv-heads", "8 % 16 = 8"),
        ({"sequences": 12}, "batch-divides", "12 % 8 = 4"),
        ({"length": 16384}, "sequence-fits-positions", "16384 tokens"),
        ({"dp_shard": 16, "sequences": 16}, "fits-cluster", "128 ranks"),
        (
            {"tp_overlap": "ring", "sequence_parallel": False},
            "no-effect",
            "rows that sequence parallelism gathers",
        ),
        ({"tp": 1, "dp_shard": 8}, "no-effect", "tp = 1"),
        (
            {**PLAIN_RUN, "servers": 1, "optimizer": "muon"},
            "servers-update-elements",
            "servers = 1",
        ),
        (
            {"servers": 1, "dp_shard": 4, "tp": 4},
            "servers-split-samples",
            "dp_shard = 4 and tp = 4",
        ),
    ],
)
def test_a_rule_is_told_with_its_arithmetic(changes: dict[str, Any], rule: str, says: str) -> None:
    found = broken(**changes)
    assert list(found) == [rule]
    assert says in found[rule]


def test_servers_are_for_dense_models_and_memory_is_shared_by_gpus() -> None:
    found = broken("mixtral-8x7b", **PLAIN_RUN, servers=1)
    assert list(found) == ["servers-hold-dense-models"]
    found = broken("nano", "laptop", tp=2, sequence_parallel=True, tp_overlap="symmetric-memory")
    assert "are no GPUs" in found["symmetric-memory-reaches-ranks"]
