"""Sums and gathers by messages are proven alone and beside every other split, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.axis import Axis
from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Zero
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import SentTerm
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught
from tests.proof.run import collectives
from tests.proof.run.collective_tiers import tiers_run
from tests.proof.run.collectives import on_nodes, summed
from tests.walks.plans.bytes_walk import compare_plan

REPLICAS: dict[str, Any] = {"mesh": {"dp_replicate": 4, "dp_shard": 2}, "each": 4, "dp": 8}

PLANS: dict[str, Plan] = {
    "2x2": summed(dp=4, each=2),
    "2x4": summed(dp=8, each=4),
    "zero 1": summed(zero={"stage": 1}, **REPLICAS),
    "zero 2": summed(zero={"stage": 2}, **REPLICAS),
    "zero 3": summed(zero={"stage": 3}, **REPLICAS),
    "tensor": summed(tp=2, dp=4, each=4),
    "sequence": summed(tp=2, dp=4, each=4, sequence_parallel=True),
    "pipeline": summed(pp=2, dp=4, each=2),
    "context": summed(dp=2, mesh={"cp": 2}, each=2),
    "experts": on_nodes(plan_of(model=MIXTRAL, dp_shard=8, ep=2), 4),
    **{f"shards {stage}": summed(zero={"stage": stage}, dp=4, each=2) for stage in (1, 2, 3)},
    "2x4 shards": summed(zero={"stage": 3}, dp=8, each=4),
    "secondary": summed(zero={"stage": 3, "secondary": True}, dp=4, each=2),
    "tensor over nodes": summed(tp=4, each=2),
    "sequence over nodes": summed(tp=4, each=2, sequence_parallel=True),
    "tensor and shards": summed(tp=4, dp=2, each=2, zero={"stage": 3}, sequence_parallel=True),
    "pipeline and shards": summed(pp=2, dp=4, each=2, zero={"stage": 2}, tied=True),
    "context and shards": summed(dp=2, each=2, zero={"stage": 3}, mesh={"cp": 2}),
    "shards of experts": on_nodes(
        plan_of(
            model=MIXTRAL, dp_shard=8, ep=2, zero=Zero(stage=3), experts=ExpertLayout(zero_stage=3)
        ),
        4,
    ),
    "ring of shards": summed(dp=3, each=3, algorithm="ring", zero={"stage": 3}),
    "ring of tensor ranks": summed(tp=2, pp=2, tied=True, each=4, algorithm="ring"),
    "halving of shards": summed(dp=4, each=4, algorithm="halving-doubling", zero={"stage": 2}),
    "tree of tensor ranks": summed(tp=2, dp=2, each=2, algorithm="tree", zero={"stage": 1}),
    "ring": summed(dp=3, each=3, algorithm="ring"),
    "tree": summed(dp=3, each=3, algorithm="tree"),
    "halving": summed(dp=4, each=4, algorithm="halving-doubling"),
}


@pytest.mark.system("S12")
@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = prove(PLANS[name], run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert all(claim.compared > 0 for one in proof.passes for claim in one.claims)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", PLANS)
def test_bytes_sent_and_held_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    assert not compare_plan(PLANS[name], rank_pool.run).problems


def counted(term: SentTerm) -> bool:
    """True if `tiers_run` counts these bytes: no message of stages, no rows of experts."""
    message = term.axis == Axis.PP and term.name.startswith(("activations", "gradients"))
    return term.far is not None and not message and term.axis not in ("ep", "stage")


@pytest.mark.quick("zero 2", "context")
@pytest.mark.parametrize("name", PLANS)
def test_what_leaves_a_node_is_that_of_the_formula(name: str, rank_pool: RankPool) -> None:
    plan = PLANS[name]
    for rank, (near, far) in enumerate(tiers_run(plan, rank_pool)):
        terms = [term for term in bytes_sent(plan, rank) if counted(term)]
        beyond = sum(one.count * one.far for one in terms if one.far is not None)
        assert (near, far) == (sum(one.bytes for one in terms) - beyond, beyond), rank


@pytest.mark.slow
def test_sums_that_complete_late_are_the_same_bits(rank_pool: RankPool) -> None:
    prove(PLANS["2x2"], run_ranks=rank_pool.run, own_precision=False, late=True).require()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mutant", "told"), mutants_of(collectives))
def test_a_bug_in_the_steps_is_caught_and_named(
    mutant: str, told: Told, rank_pool: RankPool
) -> None:
    assert_caught(mutant, told, rank_pool)
