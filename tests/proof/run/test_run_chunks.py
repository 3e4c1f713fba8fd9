"""Plans whose products run in chunks are proven beside one device, with all that they go with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.plan import Plan, Recompute, RecomputedOperator, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.layouts import DEEPSEEK, GPT2, NANO, QWEN, plan_of
from tests.walks import shortened
from tests.walks.plans.bytes_walk import PRECISIONS

RING: dict[str, Any] = {"sequence_parallel": True, "tp_overlap": "ring"}
WIDE = replace(NANO, heads=8, kv_heads=4, head_dim=2)
THREE = replace(NANO, heads=6, kv_heads=3, ffn=27)


def redone(*operators: RecomputedOperator) -> Recompute:
    return Recompute(policy="selective", operators=operators)


PLANS: dict[str, Plan] = {
    "tied": plan_of(tp=2, model=QWEN, **RING),
    "stages, B and W apart": plan_of(
        pp=2, tp=2, model=QWEN, schedule="zb-h1", microbatches=3, **RING
    ),
    "stage 3, norms made again": plan_of(
        dp_shard=2,
        tp=2,
        model=QWEN,
        zero=Zero(stage=3, accumulate="slices"),
        recompute=redone("norm", "activation"),
        **RING,
    ),
    "four ranks": plan_of(tp=4, model=WIDE, **RING),
    "three ranks": plan_of(tp=3, model=THREE, sequence_length=12, **RING),
    "whole blocks made again": plan_of(
        tp=4, model=WIDE, recompute=Recompute(policy="full"), **RING
    ),
    "all operators made again": plan_of(
        tp=4, model=WIDE, recompute=redone("norm", "mlp", "attention"), **RING
    ),
    "context ranks": plan_of(cp=2, tp=2, **RING),
    "shared experts": plan_of(tp=2, ep=2, dp_shard=2, model=DEEPSEEK, **RING),
    "dropout": plan_of(tp=2, model=replace(GPT2, dropout=0.2), **RING),
    "bf16": plan_of(tp=2, model=QWEN, precision=PRECISIONS[1], **RING),
    "bf16 throughout": plan_of(tp=4, model=WIDE, precision=PRECISIONS[3], **RING),
}

QUICK = ("tied", "bf16")
"""Two ranks each, in float32 and in bfloat16."""


@pytest.mark.one_in(2)
@pytest.mark.system("B07")
@pytest.mark.parametrize("name", shortened(PLANS, lambda name: name in QUICK))
def test_a_plan_in_chunks_is_proven_and_waits_for_all_that_it_uses(
    name: str, rank_pool: RankPool
) -> None:
    proof = prove(PLANS[name], run_ranks=rank_pool.run, late=True)
    proof.require()
    assert proof.proven


@pytest.mark.slow
def test_a_ring_changes_the_order_of_sums_and_nothing_else(rank_pool: RankPool) -> None:
    """In float64 it is as near to one device as collectives are: both within rounding."""
    ring = PLANS["four ranks"]
    plain = replace(ring, layout=replace(ring.layout, tp_overlap="none"))
    assert ring.same_mathematics(plain)
    for plan in (ring, plain):
        proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
        proof.require()


def test_fused_products_are_proven_as_a_ring_and_it_says_so(rank_pool: RankPool) -> None:
    ring = PLANS["tied"]
    fused = replace(ring, layout=replace(ring.layout, tp_overlap="symmetric-memory"))
    proof = prove(fused, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert proof.shrunk_plan.layout.tp_overlap == "ring"
    assert proof.mesh == "tp2, fused products as a ring,"
