"""Blocks of any size hold the same keys, and rows stand where they belong."""

from __future__ import annotations

import pytest

from echelon.launch.local.pool import RankPool
from tests.inference.cases import PROMPTS, without_cache
from tests.inference.runs import COUNT, generation_plan, written


@pytest.mark.quick("gqa-3", "window-1")
@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("name", ["gqa", "window"])
def test_the_size_of_blocks_changes_nothing(
    name: str, block_tokens: int, rank_pool: RankPool
) -> None:
    plan = generation_plan(name)
    (found,) = written(rank_pool, plan, block_tokens=block_tokens)
    assert found.texts == without_cache(plan, PROMPTS, COUNT)
