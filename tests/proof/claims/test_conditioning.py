"""A model that enlarges roundings is given what a rounding is worth to it, and no more."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.launch.local.supervisor import RankPool
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.claims.conditioning import (
    MOST_OF_ROUNDING,
    MovedRun,
    conditioned_tolerance,
    may_be_rounding,
)
from echelon.proof.claims.tolerance import run_errors
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.oracle.oracle import initial_parameters, run_oracle
from echelon.proof.run import prove
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout

CHAOTIC = load_job(
    "nano",
    [
        *("train.seed=7", "mesh.dp_shard=2", "zero.stage=3", "zero.parameter_offload=host"),
        *("model.layers=12", "model.heads=8", "model.kv_heads=8", "model.head_dim=32"),
        *("model.hidden=96", "model.ffn=96", "model.vocab=999", "model.norm=layernorm"),
        *(
            "model.gated=false",
            "model.activation=gelu",
            "model.qk_norm=true",
            "model.attention_scale=4",
        ),
        *("optimizer.kind=sgd", "optimizer.warmup_steps=0"),
    ],
).plan
"""Eleven narrow blocks with steep attention over norms of few numbers; steps move them far."""


def result(*errors: float, allowed: float = FLOAT64_TOLERANCE) -> ClaimResult:
    checks = [Check(0, "head.weight", error, allowed=allowed) for error in errors]
    return judged(rules.PROVE_GRADIENTS, "gradients", checks)


def test_only_what_is_off_by_little_may_be_rounding() -> None:
    plan = shrink(layout(dp=2), precision="fp64")
    assert may_be_rounding(plan, [result(1e-12), result(3e-10)])
    assert not may_be_rounding(plan, [result(1e-12)])
    assert not may_be_rounding(plan, [result(3e-10), result(1e-3)])
    assert not may_be_rounding(plan, [result(3e-10), result(1e-10, allowed=0.0)])
    assert not may_be_rounding(plan, [result(float("nan"))])


def test_a_precision_of_few_digits_hides_nothing() -> None:
    """An error as large as one rounding to bfloat16 is no rounding of float32."""
    fp32 = shrink(layout(dp=2))
    assert may_be_rounding(fp32, [result(3e-6, allowed=2e-6)])
    assert not may_be_rounding(fp32, [result(2.0**-9, allowed=2e-6)])
    codes = {"int8_block": 4}
    for precision in ({"parameters": "bf16"}, {"reduction": "bf16"}, {"matmul": "fp8"}, codes):
        low = shrink(layout(dp=2, precision=precision))
        assert not may_be_rounding(low, [result(3e-6, allowed=2e-6)])


def run_from(plan: Plan) -> MovedRun:
    """Return the oracle of a plan, as a run from other initial values."""
    return lambda initial, forced: run_oracle(plan, len(forced), initial=initial, forced=forced)


def test_an_ordinary_model_is_allowed_nothing_more() -> None:
    plan = shrink(layout(dp=2), precision="fp64")
    oracle = run_oracle(plan, 3)
    tolerance = conditioned_tolerance(plan, oracle, run_from(plan))
    assert not tolerance.own_precision
    for name in oracle[0].gradients:
        assert tolerance.allowed("gradients", 2, name) == pytest.approx(1e-10, rel=0.05)


@pytest.mark.slow
def test_a_rounding_is_worth_what_it_is_enlarged_by() -> None:
    """What one rounding of one weight changes lies within, and a wrong weight does not."""
    plan = shrink(CHAOTIC, precision="fp64", names_apart=True)
    assert plan.model.layers == 11
    oracle = run_oracle(plan, 3)
    tolerance = conditioned_tolerance(plan, oracle, run_from(plan))
    assert max(tolerance.allowed(*key) for key in tolerance.one_device) > 5e-10
    first = initial_parameters(plan)
    name = "layers.0.attention.v.weight"

    def errors(share: float) -> dict[tuple[str, int, str], float]:
        moved = {**first, name: first[name].double() * (1.0 + share)}
        run = run_oracle(plan, 3, initial=moved)
        found = run_errors(plan, oracle, run, has_masters=False)
        return {key: error / tolerance.allowed(*key) for key, (error, _) in found.items()}

    assert max(errors(2.0**-52).values()) < 1.0
    wrong = errors(MOST_OF_ROUNDING["fp64"])
    assert min(wrong["gradients", step, name] for step in range(3)) > 100.0


def test_tokens_go_where_they_went() -> None:
    """Experts that a moved weight would choose otherwise say nothing about roundings."""
    plan = shrink(
        layout(dp=2, model={"experts": Experts(num_experts=4, top_k=2, ffn=32)}), precision="fp64"
    )
    oracle = run_oracle(plan, 2)
    tolerance = conditioned_tolerance(plan, oracle, run_from(plan))
    assert tolerance.allowed("scores", 1, "layers.1") == pytest.approx(1e-10, rel=0.05)


@pytest.mark.slow
def test_a_right_plan_of_such_a_model_is_proven(rank_pool: RankPool) -> None:
    proof = prove(CHAOTIC, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    (gradients,) = (one for one in proof.passes[0].claims if one.rule.id == "prove-gradients")
    assert gradients.max_error < MOST_OF_ROUNDING["fp64"]


@pytest.mark.slow
@pytest.mark.parametrize("islands", [(), ("mesh.dp_replicate=4", "local_sgd.every=3")])
def test_a_right_plan_in_fp32_is_proven_whatever_its_seed(
    rank_pool: RankPool, islands: tuple[str, ...]
) -> None:
    """One token of this seed has a norm that enlarges the roundings of the forward pass."""
    flags = [
        *("train.seed=40", "train.steps=180", "mesh.cp=2", "model.layers=6", "model.heads=8"),
        *("model.kv_heads=8", "model.head_dim=32", "model.hidden=192", "model.ffn=96"),
        *("model.vocab=257", "model.soft_cap=5.0", "model.attention_scale=0.1"),
        *("batch.microbatch_sequences=3", "batch.sequence_length=48", "optimizer.kind=sgd"),
        *("optimizer.schedule=cosine", "optimizer.warmup_steps=20", *islands),
        f"batch.global_sequences={96 if islands else 6}",
    ]
    prove(load_job("nano", flags).plan, run_ranks=rank_pool.run).require()
