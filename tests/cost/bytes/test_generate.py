"""Ranks that write send what the formula says, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.cost.bytes.generate import generated_bytes, greedy_passes
from echelon.launch.local.supervisor import RankPool
from tests.inference.cases import PROMPTS
from tests.inference.runs import COUNT, generation_plan, split_name, written


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gqa", {"tp": 2}),
        ("gqa", {"pp": 2}),
        ("gqa", {"tp": 2, "pp": 2}),
        ("latent", {"tp": 4}),
        ("width-norm", {"tp": 2}),
        ("experts", {"tp": 2, "ep": 2}),
        ("experts", {"tp": 2}),
        ("shared-experts", {"tp": 2, "ep": 2}),
    ],
    ids=split_name,
)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "drawn"])
def test_ranks_send_the_bytes_of_the_formula(
    name: str, split: dict[str, Any], greedy: bool, rank_pool: RankPool
) -> None:
    plan = generation_plan(name, **split)
    sampling = {} if greedy else {"temperature": 1.0}
    passes = greedy_passes([len(one) for one in PROMPTS], COUNT, plan.mesh.pp)
    for rank, found in enumerate(written(rank_pool, plan, sampling=sampling)):
        assert found.sent == generated_bytes(plan, rank, passes, greedy=greedy)
