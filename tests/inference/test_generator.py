"""What ranks write from a cache is, token for token, what one process writes without one."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.cost.bytes.cache import cache_size
from echelon.core.plan import Plan
from echelon.launch.local.pool import RankPool
from tests.inference.cases import MODELS, PROMPTS, first_difference, without_cache
from tests.parallel.layouts import plan_of

COUNT = 14  # tokens: more than a window, and than two blocks
WRITE = "tests.inference.targets:write"


def written(pool: RankPool, plan: Plan, **changes: Any) -> list[Any]:
    """Return what each rank wrote."""
    argument = {"plan": plan.to_json(), "prompts": PROMPTS, "max_tokens": COUNT, **changes}
    return pool.run(WRITE, argument, plan.mesh.world_size)


def generation_plan(name: str, **changes: Any) -> Plan:
    """Return a plan that generates: one microbatch crosses the pipeline."""
    return plan_of(model=MODELS[name], schedule="gpipe", microbatches=1, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_writes_what_one_process_writes_without_a_cache(
    name: str, rank_pool: RankPool
) -> None:
    plan = generation_plan(name)
    (found,) = written(rank_pool, plan)
    assert first_difference(found.texts, without_cache(plan, PROMPTS, COUNT)) == ""
    assert len({tuple(text) for text in found.texts}) == len(PROMPTS)
    assert found.num_free == found.num_blocks
