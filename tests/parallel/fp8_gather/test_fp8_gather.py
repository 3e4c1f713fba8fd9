"""Parameters gathered in 8 bits: the same step bit for bit, bytes, and slices cut anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.experts import ExpertLayout
from echelon.core.plan import Optimizer, Plan, Precision, Recompute, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from echelon.proof.run import prove
from tests.parallel.layouts import ADAMW, DEEPSEEK, MIXTRAL, NANO, plan_of
from tests.parallel.one_device import assemble
from tests.parallel.targets import train
from tests.proof.layouts import BF16, Changes, layout
from tests.walks.plans.bytes_walk import compare_plan

FP8: Changes = {"matmul": "fp8", "fp8_block": 8}
GATHER: Changes = {"stage": 3, "gather": "fp8"}

CASES: dict[str, Changes] = {
    "dp3": {"dp": 3},
    "tp2": {"dp": 2, "tp": 2},
    "tp2 scattered": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "ring": {"mesh": {"cp": 2}, "dp": 2, "context": {"kind": "ring"}},
    "1f1b": {"dp": 2, "pp": 2},
    "zb-h1": {"dp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "replicas": {"mesh": {"dp_replicate": 2}, "dp": 2},
    "kept whole until the end of the step": {
        "dp": 2,
        "zero": {**GATHER, "reshard_after_forward": False},
    },
    "slices add up": {"dp": 2, "zero": {**GATHER, "accumulate": "slices", "unit_blocks": 2}},
}


def require_proven(plan: Plan, rank_pool: RankPool) -> None:
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    shrunk = proof.shrunk_plan
    assert any(one.fp8_squares for one in plan_buckets(shrunk, rank_part(shrunk, 0)))
    claims = proof.passes[0].claims
    assert max(claim.max_error for claim in claims) <= 1e-10
    assert [c.max_error for c in claims if c.rule.id == "prove-bytes-sent"] == [0.0]


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    require_proven(layout(**{"zero": GATHER, **CASES[name]}, precision=FP8), rank_pool)


@pytest.mark.slow
def test_bfloat16_is_proven_though_all_completes_late(rank_pool: RankPool) -> None:
    pipe: Changes = {"dp": 2, "pp": 2, "schedule": "zb-h1", "zero": GATHER}
    plan = layout(**pipe, precision={**BF16, **FP8})
    proof = prove(plan, run_ranks=rank_pool.run, late=True)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "bf16", "bf16, fp8"]


WIDE = replace(NANO, hidden=32, heads=8, kv_heads=4, ffn=48)
IN_8_BITS = Precision(parameters="bf16", matmul="fp8", fp8_block=4)
CODES = Zero(stage=3, gather="fp8")
PAIR: Changes = {"dp_shard": 2, "ep": 2}

STEPS: dict[str, Changes] = {
    # Slices of a third end in the middle of a row, and of a square.
    "three slices": {"dp_shard": 3},
    "tp2 scattered": {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "zb-h1": {"dp_shard": 2, "pp": 2, "schedule": "zb-h1"},
    "dualpipe": {"dp_shard": 2, "pp": 2, "schedule": "dualpipe", "microbatches": 4},
    "replicas": {"dp": 2, "dp_shard": 2},
    "muon": {"dp_shard": 2, "optimizer": replace(ADAMW, kind="muon")},
    "recompute": {"dp_shard": 2, "recompute": Recompute(policy="full")},
    "kept whole": {"dp_shard": 2, "zero": replace(CODES, reshard_after_forward=False)},
    "slices add up": {"dp_shard": 2, "zero": replace(CODES, accumulate="slices", unit_blocks=2)},
    "small ones whole": {"dp_shard": 2, "zero": replace(CODES, keep_whole_below=1024)},
    "experts": {"model": MIXTRAL, **PAIR, "dp_shard": 4},
    "shared experts": {"model": DEEPSEEK, **PAIR, "pp": 2},
    "only experts": {
        "model": MIXTRAL,
        **PAIR,
        "dp_shard": 4,
        "zero": replace(CODES, stage=1),
        "experts": ExpertLayout(zero_stage=3),
    },
}


def codes_plan(changes: Changes) -> Plan:
    """Return a plan that gathers codes; its update is not scaled by a norm of all buckets."""
    experts = ExpertLayout(zero_stage=3)
    defaults: Changes = {"model": WIDE, "precision": IN_8_BITS, "zero": CODES, "experts": experts}
    defaults["optimizer"] = ADAMW
    plan = plan_of(**{**defaults, **changes})
    optimizer: Optimizer = replace(plan.mathematics.optimizer, clip_norm=None)
    return replace(plan, mathematics=replace(plan.mathematics, optimizer=optimizer))


def gathers_parameters(plan: Plan) -> Plan:
    """Return the plan with gathers in the dtype of parameters."""
    zero = replace(plan.layout.zero, gather="parameters")
    return replace(plan, layout=replace(plan.layout, zero=zero))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_bit_for_bit_those_of_gathered_parameters(name: str, rank_pool: RankPool) -> None:
    plan = codes_plan(STEPS[name])
    assert any(one.fp8_squares for one in plan_buckets(plan, rank_part(plan, 0)))
    size = plan.mesh.world_size
    coded, plain = (
        rank_pool.run(train, (one, 3), size) for one in (plan, gathers_parameters(plan))
    )
    for one, other in zip(coded, plain, strict=True):
        assert one.losses == other.losses
    values, expected = (
        assemble(plan, [rank.parameters for rank in ranks]) for ranks in (coded, plain)
    )
    assert values.keys() == expected.keys()
    for parameter, value in values.items():
        assert torch.equal(value, expected[parameter]), parameter


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", STEPS)
def test_bytes_sent_and_held_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(codes_plan(STEPS[name]), rank_pool.run)
    assert found.problems == ()
    assert found.sent > 0
    assert found.held > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in STEPS.items() if "model" in one])
def test_experts_are_proven(name: str, rank_pool: RankPool) -> None:
    require_proven(codes_plan(STEPS[name]), rank_pool)
