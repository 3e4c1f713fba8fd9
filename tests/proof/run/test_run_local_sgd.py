"""Proofs of local SGD and DiLoCo beside one process that trains the islands one after another.

Evidence of row B06: H = 1 with plain outer SGD averages; H inner steps, outer SGD and Nesterov, per
replica of every kind; bytes are those of the formulas in each.
"""

from __future__ import annotations

import pytest

from echelon.core.rulebook import prove as rules
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import BF16, layout
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught
from tests.proof.run import local_sgd
from tests.proof.run.local_sgd import NESTEROV, with_islands

PLANS = {
    "h1": with_islands(layout(), every=1),
    "h2": with_islands(layout(), every=2),
    "h3-nesterov": with_islands(layout(), every=3, **NESTEROV),
    "h3-of-3": with_islands(layout(optimizer={"kind": "sgd"}), 3, every=3, **NESTEROV),
    "tensor": with_islands(layout(tp=2, sequence_parallel=True), **NESTEROV),
    "pipeline": with_islands(layout(pp=2, tied=True), **NESTEROV),
    "zero-0-of-2": with_islands(layout(zero={"stage": 0}, dp=2), **NESTEROV),
    "zero-1": with_islands(layout(zero={"stage": 1}, dp=2, precision=BF16), **NESTEROV),
    "zero-3": with_islands(layout(zero={"stage": 3}, dp=2), every=3, **NESTEROV),
    "context": with_islands(layout(mesh={"cp": 2}), **NESTEROV),
    "experts": with_islands(plan_of(model=MIXTRAL, dp_shard=2, ep=2), **NESTEROV),
    "fragments": with_islands(layout(zero={"stage": 1}, dp=2), every=3, fragments=2, **NESTEROV),
    "late": with_islands(layout(pp=2), every=3, delay=2, **NESTEROV),
    "late-fragments": with_islands(
        layout(zero={"stage": 3}, dp=2), every=3, delay=1, fragments=2, **NESTEROV
    ),
    "int8": with_islands(layout(zero={"stage": 1}, dp=2, tp=2), gradients="int8", **NESTEROV),
    "fp8-of-3": with_islands(layout(), 3, gradients="fp8", fragments=2, every=3),
    "int8-experts": with_islands(
        plan_of(model=MIXTRAL, dp_shard=2, ep=2), gradients="int8", **NESTEROV
    ),
    "muon-over-pipeline": with_islands(
        layout(pp=2, zero={"stage": 1}, dp=2, optimizer={"kind": "muon"}), **NESTEROV
    ),
}


@pytest.mark.system("B06")
@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", PLANS)
def test_islands_are_those_of_one_process(rank_pool: RankPool, name: str) -> None:
    proof = prove(PLANS[name], run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    told = {claim.rule.id: claim for claim in proof.passes[-1].claims}
    for rule in (rules.PROVE_OUTER_STEP, rules.PROVE_ISLANDS_AGREE, rules.PROVE_BYTES_SENT):
        assert told[rule.id].compared > 0
    assert told[rules.PROVE_OUTER_STEP.id].max_error <= 1e-10


@pytest.mark.quick("zero-1")
@pytest.mark.parametrize("name", ["zero-1", "late-fragments"])
def test_sums_that_complete_late_are_the_same_bits(rank_pool: RankPool, name: str) -> None:
    prove(PLANS[name], run_ranks=rank_pool.run, own_precision=False, late=True).require()


@pytest.mark.slow
def test_the_precision_of_a_run_is_proven(rank_pool: RankPool) -> None:
    """Evidence of row B06: bfloat16 parameters, outer steps of float32 masters."""
    proof = prove(PLANS["zero-1"], run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == [
        "fp64, island 0",
        "fp64, island 1",
        "bf16, island 0",
        "bf16, island 1",
    ]


@pytest.mark.slow
def test_codes_of_islands_are_no_matter_of_few_digits(rank_pool: RankPool) -> None:
    """Between two codes a number in float32 may become either: float64 alone tells which."""
    proof = prove(PLANS["int8"], run_ranks=rank_pool.run)
    proof.require()
    assert proof.passes[-1].precision == "fp32, island 1"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mutant", "told"), mutants_of(local_sgd))
def test_bugs_in_outer_steps_are_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool
) -> None:
    """Evidence of row B06: a momentum that is reset and an unfair mean are told as such."""
    assert_caught(mutant, told, rank_pool)
