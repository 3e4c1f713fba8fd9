"""Scales of whole tensors, from the steps before: proven under every parallelism, bytes exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.expert.test_feed_forward import CASES as EXPERTS
from tests.parallel.expert.test_feed_forward import plan_in_fp8
from tests.parallel.test_fp8_linear import BYTES, CASES, fp8_plan
from tests.proof.layouts import BF16, Changes, layout
from tests.walks.plans.bytes_walk import compare_plan

TENSOR: Changes = {
    "matmul": "fp8",
    "fp8_block": 8,
    "fp8_scales": "tensor",
    "fp8_history": 2,
    "fp8_gradients": "e5m2",
}


def in_tensors(plan: Plan) -> Plan:
    precision = replace(
        plan.mathematics.precision, fp8_scales="tensor", fp8_history=2, fp8_gradients="e5m2"
    )
    return replace(plan, mathematics=replace(plan.mathematics, precision=precision))


def require_proven(plan: Plan, rank_pool: RankPool) -> None:
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert proof.shrunk_plan.mathematics.precision.has_tensor_scales
    claims = proof.passes[0].claims
    assert max(claim.max_error for claim in claims) <= 1e-10


@pytest.mark.system("B09")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    require_proven(layout(**CASES[name], precision=TENSOR), rank_pool)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", EXPERTS)
def test_float64_is_proven_with_experts(name: str, rank_pool: RankPool) -> None:
    require_proven(in_tensors(plan_in_fp8(name)), rank_pool)


@pytest.mark.slow
def test_bfloat16_is_proven_with_products_of_both_kinds(rank_pool: RankPool) -> None:
    plan = layout(tp=2, sequence_parallel=True, precision={**BF16, **TENSOR})
    proof = prove(plan, run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "bf16", "bf16, fp8"]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", BYTES)
def test_bytes_sent_held_and_kept_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(in_tensors(fp8_plan(BYTES[name])), rank_pool.run)
    assert found.problems == ()
    assert found.kept > 0


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", EXPERTS)
def test_bytes_with_experts_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    assert compare_plan(in_tensors(plan_in_fp8(name)), rank_pool.run).problems == ()
