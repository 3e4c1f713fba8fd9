"""A router whose numbers are not finite is named with its layer, its tokens and its rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.plan import Plan, Recompute, Zero
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.training.diagnosis import explain_not_finite
from echelon.training.subject import rank_batches
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.parallel.one_device import make_rows
from tests.training.engine_targets import make_engine

ROUTER = "layers.1.mlp.router.weight"
AUX = Balance(kind="aux", z_coefficient=0.01)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"dp_shard": 2, "ep": 2, "balance": AUX},
    "pp2": {"dp_shard": 2, "pp": 2, "ep": 2, "balance": AUX},
    "whole experts, tp2": {"tp": 2, "ep": 2},
    "sequence parallel": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "pieces of experts": {"tp": 2, "dp_shard": 2, "ep": 2, "experts": ExpertLayout(expert_tp=2)},
    "cp2, with a capacity": {"cp": 2, "ep": 2, "balance": Balance(capacity_factor=1.0)},
    "recomputed": {"dp_shard": 2, "ep": 2, "recompute": Recompute(policy="full")},
    "ZeRO 3": {
        "dp_shard": 4,
        "ep": 2,
        "zero": Zero(stage=3, accumulate="slices"),
        "experts": ExpertLayout(zero_stage=3),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoiled:
    """Say what is spoiled: a row of a weight, on one rank or on all that hold it."""

    plan: Plan
    name: str
    value: float
    rank: int | None = None
    row: int = 0


def explain(context: RankContext, spoiled: Spoiled) -> str:
    """Take a step with a bad weight; return what is told of it."""
    engine = make_engine(context, spoiled.plan)
    if spoiled.rank in (None, context.rank):
        for bucket in engine.model.buckets:
            for slot in bucket.slots:
                if slot.spec.name == spoiled.name:
                    width = slot.spec.shape[-1]
                    start = slot.start + spoiled.row * width
                    part = bucket.within_own_slice(slice(start, start + width))
                    own = bucket.value_slice if bucket.plan.sliced else bucket.values
                    own[part if bucket.plan.sliced else slice(start, start + width)] = spoiled.value
    rows = make_rows(engine.plan, 0)
    runs = engine.runs_for(engine.plan.mathematics.sequence_length)
    batches = rank_batches(engine.plan, rows, engine.data_rank, 0, runs=runs)
    result = engine.step(batches, 0)
    assert not result.finite
    return explain_not_finite(engine, batches, 1, result).problems[0].message


def told(pool: RankPool, spoiled: Spoiled) -> str:
    """Return the message, which is the same on all ranks."""
    (message,) = set(pool.run(f"{__name__}:explain", spoiled, spoiled.plan.mesh.world_size))
    return message


@pytest.mark.one_in(8)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_router_is_named_with_its_tokens(
    layout: dict[str, Any], value: float, rank_pool: RankPool
) -> None:
    plan = plan_of(model=MIXTRAL, **layout)
    message = told(rank_pool, Spoiled(plan=plan, name=ROUTER, value=value))
    positions = plan.placement.positions(0)
    tokens = len(positions) // plan.mesh.tp
    first = rf"rank \d+ \({plan.mesh.label(0)}\)".replace("pp0", "pp1")
    four = ", ".join(str(one) for one in positions[:4])
    sample = rf"sample \d+, positions {four}" + (", ..." if tokens > 4 else "")
    assert re.search(
        rf"; first seen on {first}, microbatch 0 \(samples \d+\), in layers.1.mlp.router: "
        rf"the logits of {tokens} of {tokens} tokens \({sample}\); ",
        message,
    ), message
    assert f"; not finite itself is the weight {ROUTER} of rank " in message


def test_an_infinite_logit_is_seen_behind_a_sigmoid(rank_pool: RankPool) -> None:
    plan = plan_of(model=DEEPSEEK, dp_shard=2, ep=2)
    message = told(rank_pool, Spoiled(plan=plan, name=ROUTER, value=float("inf")))
    assert "in layers.1.mlp.router: the logits of 8 of 8 tokens (sample " in message


def test_the_rank_whose_router_it_is_is_named(rank_pool: RankPool) -> None:
    plan = plan_of(model=MIXTRAL, tp=2, ep=2)
    spoiled = Spoiled(plan=plan, name=ROUTER, value=float("nan"), rank=1)
    message = told(rank_pool, spoiled)
    assert "; first seen on rank 1 (tp1), microbatch 0 (samples " in message
    assert "in layers.1.mlp.router: the logits of 4 of 4 tokens (sample " in message
    assert "positions 4, 5, 6, 7)" in message


def test_what_is_not_finite_before_a_router_is_not_its_fault(rank_pool: RankPool) -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=2, ep=2)
    spoiled = Spoiled(plan=plan, name="layers.1.mlp_norm.weight", value=float("nan"))
    message = told(rank_pool, spoiled)
    assert "in layers.1.mlp_norm; " in message
    assert "router" not in message


def test_an_expert_that_is_not_finite_is_not_taken_for_its_router(rank_pool: RankPool) -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=Balance(route="even"))
    name = "layers.1.mlp.experts.5.down.weight"
    message = told(rank_pool, Spoiled(plan=plan, name=name, value=float("nan")))
    assert "in layers.1.mlp; " in message
    assert f"; not finite itself is the weight {name} of rank 1 (dp_shard1); " in message


def test_only_the_tokens_that_overflow_are_told(rank_pool: RankPool) -> None:
    plan = plan_of(model=replace(MIXTRAL, layers=1), dp_shard=2, ep=2, dtype="fp32")
    # Large enough for some rows of x to overflow, and not for others.
    spoiled = Spoiled(plan=plan, name="layers.0.mlp.router.weight", value=1e38)
    message = told(rank_pool, spoiled)
    found = re.search(r"the logits of (\d+) of 8 tokens \((.*?)\); ", message)
    assert found is not None, message
    assert 0 < int(found[1]) < 8
