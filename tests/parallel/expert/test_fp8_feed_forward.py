"""Experts that multiply 8-bit numbers: proven under every split of them, bytes exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan, Precision
from echelon.launch.local.pool import RankPool
from echelon.proof.matrix.bytes_walk import compare_plan
from echelon.proof.run import prove
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.proof.layouts import Changes

FP8 = Precision(parameters="bf16", matmul="fp8", fp8_block=4)
PADDED = {
    "experts": ExpertLayout(padded=True),
    "balance": Balance(capacity_factor=1.5),
}


def wider(model: ModelShape) -> ModelShape:
    """Return a model whose experts two tensor ranks can share in whole tiles."""
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, ffn=16))


CASES: dict[str, Changes] = {
    "one": {"model": MIXTRAL},
    "ep2": {"model": MIXTRAL, "dp_shard": 2, "ep": 2},
    "shared, ep2, tp2 scattered": {
        "model": wider(DEEPSEEK),
        "dp_shard": 2,
        "ep": 2,
        "tp": 2,
        "sequence_parallel": True,
    },
    "pieces of experts": {
        "model": wider(MIXTRAL),
        "tp": 2,
        "experts": ExpertLayout(expert_tp=2),
    },
    "shared, zb-h1": {"model": DEEPSEEK, "pp": 2, "schedule": "zb-h1"},
    "padded": {"model": MIXTRAL, "dp_shard": 2, "ep": 2, **PADDED},
}


def plan_in_fp8(name: str) -> Plan:
    """Return the plan of a case, whose widths are multiples of 4 on every rank."""
    return plan_of(precision=FP8, microbatch_sequences=2, **CASES[name])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CASES)
def test_bytes_sent_held_and_kept_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(plan_in_fp8(name), rank_pool.run)
    assert found.problems == ()
    assert found.kept > 0


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = prove(plan_in_fp8(name), run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert max(claim.max_error for claim in proof.passes[0].claims) <= 1e-10


@pytest.mark.slow
def test_bfloat16_is_proven(rank_pool: RankPool) -> None:
    proof = prove(plan_in_fp8("ep2"), run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "bf16", "bf16, fp8"]
