"""Collectives that complete late give what they give otherwise, and nothing before."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.launch.local.supervisor import RankPool
from tests.parallel.completion.late_targets import every_operation


def test_every_operation_gives_the_same_bits_and_bytes_late(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for prompt, late in rank_pool.run(every_operation, str(tmp_path), world_size=3):
        assert prompt["results"].keys() == late["results"].keys()
        for name, result in prompt["results"].items():
            assert torch.equal(result, late["results"][name]), name
        assert torch.equal(prompt["rows"], late["rows"])
        assert prompt["sent"] == late["sent"]
        assert prompt["alone"] == late["alone"]
        assert all(late["early"].values()), "each result is poison until it is awaited"
        assert (prompt["operations"], late["operations"]) == (0, 9)
    assert not any(file.read_text() for file in tmp_path.iterdir())
