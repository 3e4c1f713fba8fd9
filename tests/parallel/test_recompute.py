"""Recompute: the same numbers, the forward collectives again, dropout included."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from echelon.core.plan import Plan, Recompute
from echelon.launch.local.pool import RankPool
from tests.parallel import targets
from tests.parallel.layouts import NANO, plan_of
from tests.parallel.targets import Trained

DROPPING = replace(NANO, dropout=0.2)


def train(rank_pool: RankPool, plan: Plan) -> list[Trained]:
    """Take two steps on the ranks of a plan."""
    return rank_pool.run(targets.train, (plan, 2), world_size=plan.mesh.world_size)


def forward_calls(rank: Trained) -> int:
    """Return how often a row layer summed forward in the last step."""
    return Counter(event.name for event in rank.events[-1])["row.forward"]


@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
def test_recomputed_runs_are_bitwise_the_same(rank_pool: RankPool, scattered: bool) -> None:
    plan = plan_of(tp=2, model=DROPPING, sequence_parallel=scattered, microbatches=2)
    kept = train(rank_pool, plan)
    for every, again in ((1, 4), (2, 2), (3, 2)):
        recompute = Recompute(policy="full", every=every)
        other = train(rank_pool, replace(plan, layout=replace(plan.layout, recompute=recompute)))
        for one, two in zip(kept, other, strict=True):
            assert one.losses == two.losses
            assert one.norms == two.norms
            for name, shards in one.parameters.items():
                assert torch.equal(shards[0].tensor, two.parameters[name][0].tensor)
            assert forward_calls(one) == 2 * 2 * 4
            assert forward_calls(two) == 2 * 2 * (4 + again)


@pytest.mark.parametrize("pp", [1, 2])
def test_where_inputs_wait_changes_no_bit(rank_pool: RankPool, pp: int) -> None:
    plan = plan_of(pp=pp, model=DROPPING, microbatches=4)
    runs = [
        train(rank_pool, replace(plan, layout=replace(plan.layout, recompute=recompute)))
        for recompute in (
            Recompute(),
            Recompute(policy="full", offload="host"),
            Recompute(policy="full", every=2, offload="host"),
        )
    ]
    for kept, *others in zip(*runs, strict=True):
        for other in others:
            assert kept.losses == other.losses
            assert kept.norms == other.norms
            for name, shards in kept.parameters.items():
                assert torch.equal(shards[0].tensor, other.parameters[name][0].tensor)
