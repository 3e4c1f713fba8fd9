"""Groups, first weights and shards of ranks: one model under every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.models.counter_random import initial_values
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.parallel.one_device import assemble
from tests.parallel.tensor import pair_targets


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(model=QWEN, dp=2, tp=2),
        plan_of(model=GPT2, pp=2, tp=2, sequence_parallel=True),
        plan_of(model=replace(NANO, heads=4, kv_heads=4, vocab=5), tp=4),
        plan_of(model=QWEN, pp=4, dtype="fp32", microbatches=4),
    ],
    ids=["dp2 x tp2", "pp2 x tp2", "tp4, a rank of padding", "pp4"],
)
def test_one_seed_gives_one_model_under_every_layout(rank_pool: RankPool, plan: Plan) -> None:
    ranks = rank_pool.run(pair_targets.first_weights, plan, world_size=plan.mesh.world_size)
    whole = assemble(plan, ranks)
    for spec in parameters(plan.model):
        expected = initial_values(plan.model, spec, plan.mathematics.seed)
        assert torch.equal(whole[spec.name], expected.to(whole[spec.name].dtype)), spec.name


def test_parameters_and_gradients_are_views_of_their_buckets(rank_pool: RankPool) -> None:
    plan = plan_of(model=GPT2, dp=3, tp=2)
    assert all(rank_pool.run(pair_targets.random_weights, plan, world_size=6))
