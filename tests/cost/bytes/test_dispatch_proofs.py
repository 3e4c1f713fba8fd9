"""Bytes that experts send are those of the routing of one device, whatever the layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Recompute, Zero
from echelon.launch.local.supervisor import RankPool
from echelon.layout.expert_load import expert_load_from_routing
from echelon.proof.run import prove
from tests.cost.bytes.mixtures import AUX, BY_SEQUENCE, PIECES, TIGHT, TWO_HOPS, on_nodes
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(model=MIXTRAL, dp=2, dp_shard=2, cp=2, ep=4, microbatch_sequences=2),
        plan_of(model=MIXTRAL, dp_shard=2, cp=2, tp=2, ep=8, microbatch_sequences=2),
        plan_of(model=MIXTRAL, dp_shard=2, tp=2, ep=2, experts=PIECES, microbatches=3),
    ],
)
def test_every_token_is_dispatched_by_one_rank_or_by_all_pieces(plan: Plan) -> None:
    tokens, k = plan.tokens_per_step, 2
    shape = plan.mathematics.global_sequences, plan.mathematics.sequence_length, k
    numbered = np.arange(tokens * k).reshape(shape)
    held = plan.layout.experts.expert_tp
    seen: list[int] = []
    for group in plan.mesh.expert_groups(expert_tp=held):
        load = expert_load_from_routing(plan, group[0], {0: numbered})
        seen += [int(n) for rows in load.choices.values() for one in rows for n in one.ravel()]
    assert sorted(seen) == sorted(list(range(tokens * k)) * held)


PROVEN = {
    "tp2 scattered, shared": plan_of(
        model=DEEPSEEK, tp=2, ep=2, balance=AUX, sequence_parallel=True
    ),
    "pieces, score": plan_of(
        model=DEEPSEEK,
        cp=2,
        tp=2,
        ep=2,
        microbatch_sequences=2,
        balance=replace(TIGHT, drop="score"),
        experts=PIECES,
    ),
    "recompute, chunks": plan_of(
        model=MIXTRAL,
        dp_shard=2,
        ep=2,
        balance=BY_SEQUENCE,
        recompute=Recompute(policy="full", every=2),
        experts=ExpertLayout(chunks=2),
    ),
    "both ways": plan_of(
        model=replace(MIXTRAL, layers=4),
        pp=2,
        dp_shard=2,
        ep=2,
        balance=AUX,
        schedule="dualpipe",
        microbatches=4,
    ),
    "all to one, ZeRO": plan_of(
        model=MIXTRAL,
        dp=2,
        dp_shard=2,
        ep=2,
        balance=replace(AUX, route="one"),
        zero=Zero(stage=3),
        experts=ExpertLayout(zero_stage=1),
    ),
    "padded": plan_of(
        model=DEEPSEEK,
        dp_shard=2,
        cp=2,
        ep=4,
        microbatch_sequences=2,
        balance=TIGHT,
        experts=ExpertLayout(padded=True, chunks=2),
    ),
    "two hops": on_nodes(
        2,
        model=DEEPSEEK,
        dp_shard=2,
        cp=2,
        tp=2,
        ep=8,
        microbatch_sequences=2,
        balance=TIGHT,
        recompute=Recompute(policy="full"),
        experts=replace(TWO_HOPS, chunks=2),
    ),
}


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("plan", list(PROVEN.values()), ids=list(PROVEN))
def test_ranks_send_what_the_formulas_say_of_the_routing_of_one_device(
    rank_pool: RankPool, plan: Plan
) -> None:
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    claims = {claim.rule.id: claim for one in proof.passes for claim in one.claims}
    assert claims["prove-bytes-sent"].failures == ()
    assert claims["prove-bytes-sent"].compared >= 3 * plan.mesh.world_size * 2
