"""What ranks write from a cache is, token for token, what one process writes without one."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.experts import ExpertLayout
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


SPLIT = [
    ("gqa", {"tp": 2}),
    ("mha", {"tp": 4}),
    ("gqa", {"pp": 2}),
    ("gqa", {"pp": 4}),
    ("gqa", {"tp": 2, "pp": 2}),
    ("mqa", {"pp": 2}),
    ("latent", {"tp": 4}),
    ("latent", {"tp": 2, "pp": 2}),
    ("window", {"tp": 2}),
    ("window", {"pp": 2}),
    ("window-latent", {"tp": 2}),
    ("soft-cap", {"tp": 2}),
    ("qk-norm", {"tp": 2, "pp": 2}),
    ("learned", {"tp": 2, "pp": 2}),
    ("learned", {"tp": 4}),
    ("experts", {"tp": 2}),
    ("experts", {"tp": 2, "experts": ExpertLayout(expert_tp=2)}),
    ("experts", {"tp": 2, "ep": 2}),
    ("shared-experts", {"tp": 2, "ep": 2}),
    ("shared-experts", {"tp": 2, "ep": 2, "pp": 2}),
]


def split_name(value: object) -> str:
    """Return how a case is called."""
    if isinstance(value, dict):
        return "-".join(f"{k}{v if isinstance(v, int) else ''}" for k, v in value.items())
    return str(value)


@pytest.mark.parametrize(("name", "split"), SPLIT, ids=split_name)
def test_ranks_write_what_one_process_writes_without_a_cache(
    name: str, split: dict[str, Any], rank_pool: RankPool
) -> None:
    plan = generation_plan(name, **split)
    expected = without_cache(plan, PROMPTS, COUNT)
    model, mesh = plan.model, plan.mesh
    size = cache_size(
        model,
        map(len, PROMPTS),
        max_tokens=COUNT,
        block_tokens=4,
        tp=mesh.tp,
        layers=model.layers // mesh.pp,
        dtype="fp64",
    )
    for found in written(rank_pool, plan):
        assert first_difference(found.texts, expected) == ""
        assert found.cache_bytes == size.num_bytes
        assert found.num_free == found.num_blocks
