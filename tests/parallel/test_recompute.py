"""Recompute: the same numbers, the forward collectives again, dropout included."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from echelon.core.plan import Context, Plan, Recompute, RecomputedOperator, Zero
from echelon.launch.local.supervisor import RankPool
from tests.parallel import targets
from tests.parallel.layouts import DEEPSEEK, GPT2, NANO, QWEN, plan_of
from tests.parallel.pipeline.pipelines import pipeline_plan
from tests.parallel.targets import Trained

DROPPING = replace(NANO, dropout=0.2)


def train(rank_pool: RankPool, plan: Plan) -> list[Trained]:
    """Take two steps on the ranks of a plan."""
    return rank_pool.run(targets.train, (plan, 2), world_size=plan.mesh.world_size)


def forward_calls(rank: Trained) -> int:
    """Return how often a row layer summed forward in the last step."""
    return Counter(event.name for event in rank.events[-1])["row.forward"]


@pytest.mark.one_in(2)
@pytest.mark.system("S42")
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


@pytest.mark.one_in(2)
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


ALL_OPERATORS: tuple[RecomputedOperator, ...] = ("norm", "mlp", "attention")

SELECTED = {
    "norm": (plan_of(dp=2), ("norm",)),
    "activation": (plan_of(dp=2), ("activation",)),
    "attention": (plan_of(dp=2), ("attention",)),
    "mlp": (plan_of(dp=2), ("mlp",)),
    "norm and mlp": (plan_of(), ("norm", "mlp")),
    "normed heads": (plan_of(model=QWEN), ALL_OPERATORS),
    "layer norm": (plan_of(model=GPT2), ALL_OPERATORS),
    "tensor": (plan_of(tp=2, model=DROPPING), ALL_OPERATORS),
    "sequence": (plan_of(tp=2, model=DROPPING, sequence_parallel=True), ALL_OPERATORS),
    "ring": (plan_of(cp=2), ALL_OPERATORS),
    "gathered": (plan_of(cp=2, context=Context(kind="gathered")), ALL_OPERATORS),
    "ulysses": (
        plan_of(cp=2, context=Context(kind="ulysses", ulysses_degree=2)),
        ALL_OPERATORS,
    ),
    "pipeline": (plan_of(pp=2, microbatches=4), ALL_OPERATORS),
    "zero bubble": (pipeline_plan("zb-h1", 2), ALL_OPERATORS),
    "zero 3": (plan_of(dp_shard=2, zero=Zero(stage=3)), ALL_OPERATORS),
    "experts": (plan_of(model=DEEPSEEK, dp_shard=2, ep=2), ALL_OPERATORS),
    "bf16": (plan_of(dtype="bf16"), ALL_OPERATORS),
}


@pytest.mark.system("S42")
@pytest.mark.one_in(8)
@pytest.mark.parametrize(("plan", "operators"), SELECTED.values(), ids=list(SELECTED))
def test_operators_made_again_change_no_bit(
    rank_pool: RankPool, plan: Plan, operators: tuple[RecomputedOperator, ...]
) -> None:
    kept = train(rank_pool, plan)
    for recompute in (
        Recompute(policy="selective", operators=operators),
        Recompute(policy="full", every=2, operators=operators),
    ):
        other = train(rank_pool, replace(plan, layout=replace(plan.layout, recompute=recompute)))
        for one, two in zip(kept, other, strict=True):
            assert one.losses == two.losses
            assert one.norms == two.norms
            for name, shards in one.parameters.items():
                assert torch.equal(shards[0].tensor, two.parameters[name][0].tensor)
