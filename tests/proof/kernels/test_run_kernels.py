"""Plans with a kernel for each piece, proven on processors: as formulas, and compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.choices.kernels import Kernels
from echelon.core.plan import Plan, Recompute
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, QWEN, plan_of
from tests.parallel.pipeline.pipelines import pipeline_plan
from tests.proof.kernels import planted
from tests.proof.layouts import BF16, FP16, layout
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught
from tests.walks.plans.bytes_walk import compare_plan

EVERY = ("norm", "residual", "rotary", "swiglu", "loss")
SELECTIVE = Recompute(policy="selective", operators=("norm", "activation"))
ALL_OPERATORS = Recompute(policy="selective", operators=("norm", "mlp", "attention"))


def with_kernels(plan: Plan, provider: Any = "triton", fused: Any = EVERY) -> Plan:
    """Return a plan with kernels."""
    kernels = Kernels(provider=provider, fused=fused)
    return replace(plan, layout=replace(plan.layout, kernels=kernels))


def recomputed(plan: Plan, recompute: Recompute) -> Plan:
    """Return a plan that recomputes."""
    return replace(plan, layout=replace(plan.layout, recompute=recompute))


PROVEN = {
    "sequence parallel": layout(tp=2, sequence_parallel=True),
    "operators again": recomputed(layout(tp=2, sequence_parallel=True), ALL_OPERATORS),
    "zero 3, blocks again": layout(dp=2, zero={"stage": 3}, recompute="full"),
    "B and W apart, norms again": recomputed(
        layout(pp=2, schedule="zb-h1", zero={"stage": 1}, dp=1), SELECTIVE
    ),
    "norms of heads": layout(model={"qk_norm": True}, dp=2),
    "dropped": layout(model={"dropout": 0.3}, tp=2),
    "a ring": layout(mesh={"cp": 2}, context={"kind": "ring"}),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", PROVEN)
def test_a_plan_with_kernels_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = prove(with_kernels(PROVEN[name]), run_ranks=rank_pool.run)
    proof.require()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        layout(precision=BF16, tp=2, sequence_parallel=True, model={"qk_norm": True}),
        layout(precision=FP16, dp=2, zero={"stage": 2}),
        plan_of(model=MIXTRAL, dp_shard=2, ep=2, dtype="bf16"),
    ],
    ids=["bf16", "fp16", "experts"],
)
def test_in_few_digits_too(plan: Plan, rank_pool: RankPool) -> None:
    prove(with_kernels(plan), run_ranks=rank_pool.run, own_precision=True).require()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mutant", "told"), mutants_of(planted))
def test_a_bug_in_a_kernel_is_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool
) -> None:
    assert_caught(mutant, told, rank_pool)


COMPILED = {
    "sequence parallel in bf16": layout(tp=2, sequence_parallel=True, precision=BF16),
    "B and W apart, operators again": recomputed(layout(pp=2, schedule="zb-h1"), ALL_OPERATORS),
    "zero 3": layout(dp=2, zero={"stage": 3}, recompute="full"),
    "experts": plan_of(model=DEEPSEEK, dp_shard=2, ep=2, dtype="fp32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_plan_with_compiled_pieces_is_proven(name: str, rank_pool: RankPool) -> None:
    plan = with_kernels(COMPILED[name], "compiled")
    prove(plan, run_ranks=rank_pool.run, own_precision=True).require()


KEPT = {
    "dense": plan_of(),
    "sequence parallel": plan_of(tp=2, sequence_parallel=True, dtype="bf16"),
    "norm again": plan_of(recompute=SELECTIVE),
    "operators again": plan_of(tp=2, recompute=ALL_OPERATORS),
    "norms of heads": plan_of(model=QWEN),
    "a ring": plan_of(cp=2),
    "experts": plan_of(model=DEEPSEEK, dp_shard=2, ep=2),
    "B and W apart": pipeline_plan("zb-h1", 2),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("fused", [EVERY, ("norm", "swiglu"), ("rotary",)], ids="-".join)
def test_kernels_keep_what_formulas_say(
    name: str, fused: tuple[str, ...], rank_pool: RankPool
) -> None:
    found = compare_plan(with_kernels(KEPT[name], fused=fused), rank_pool.run)
    assert not found.problems
    if KEPT[name].mathematics.precision.parameters == "fp64":
        # Its loss is the same; pieces of float32 are a GPU's business.
        assert abs(found.peak_error) <= 0.02
