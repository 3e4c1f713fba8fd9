"""Strategies: each makes a plan of as many ranks as are asked for, and changes no mathematics."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.choices.strategies import STRATEGIES

EXPERTS = ("ep",)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_strategy_splits_the_run_and_nothing_else(name: str, ranks: int) -> None:
    run = "toy-experts" if name in EXPERTS else "nano"
    heads = () if name in EXPERTS else ("model.kv_heads=4", "batch.microbatch_sequences=4")
    alone = load_job(run, [*heads, "mesh.dp_replicate=1", "mesh.dp_shard=1", "mesh.ep=1"])
    plan = load_job(run, (*heads, *STRATEGIES[name].settings(ranks))).plan
    assert plan.mesh.num_workers == ranks
    assert plan.mesh.servers == STRATEGIES[name].servers
    assert plan.mathematics == alone.plan.mathematics
    for axis in STRATEGIES[name].axes:
        assert getattr(plan.mesh, axis) == ranks


def test_a_strategy_takes_the_place_of_the_mesh_of_the_run() -> None:
    plan = load_job("nano-zero3", STRATEGIES["tp"].settings(2)).plan
    assert (plan.mesh.tp, plan.mesh.world_size, plan.layout.zero.stage) == (2, 2, 0)
