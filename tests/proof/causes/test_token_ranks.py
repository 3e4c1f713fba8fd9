"""The tokens that the prover says a rank routes are those that the engine's rank routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.axis import Axis
from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.causes.token_ranks import dispatched_tokens, token_rows
from echelon.proof.claims.checks import dp_rank_of
from echelon.proof.oracle.batches import global_batch
from echelon.training.subject import EngineSubject
from tests.parallel.layouts import MIXTRAL, plan_of

Routed = list[tuple[int, int, list[int]]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_shard": 2, "ep": 2, "microbatch_sequences": 2},
    "tp and cp": {"cp": 2, "tp": 2, "ep": 2, "microbatch_sequences": 2},
    "pieces": {"tp": 2, "dp_shard": 2, "ep": 2, "experts": ExpertLayout(expert_tp=2)},
}


def routed(context: RankContext, plan: Plan) -> Routed:
    """Take a step; return (layer, microbatch, numbers of tokens) of what this rank routed."""
    place: Any = context
    report = EngineSubject(plan, place).step(global_batch(plan, 0), 0)
    said: Any = report.routing
    return [(one.layer, one.microbatch, list(one.tokens)) for one in said.routes]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_rank_routes_the_tokens_that_are_said_to_be_its_own(
    layout: dict[str, Any], rank_pool: RankPool
) -> None:
    plan = plan_of(model=MIXTRAL, **layout)
    rows, length = token_rows(plan), plan.mathematics.sequence_length
    samples = torch.tensor(global_batch(plan, 0).sample_ids)
    position_N = torch.arange(length).repeat_interleave(len(samples))
    number_N = samples[rows.sequence_N] * length + position_N
    for rank, said in enumerate(rank_pool.run(f"{__name__}:routed", plan, plan.mesh.world_size)):
        here = plan.mesh.coordinates(rank)
        mine_N = (
            (rows.data_N == dp_rank_of(plan, rank))
            & (rows.context_N == here[Axis.CP])
            & (rows.tensor_N == here[Axis.TP])
        )
        for _, microbatch, numbers in said:
            of_it = torch.nonzero(mine_N & (rows.microbatch_N == microbatch))[:, 0]
            assert numbers == number_N[of_it[rows.row_N[of_it].argsort()]].tolist()


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_token_is_dispatched_once(chunks: int) -> None:
    plan = plan_of(model=MIXTRAL, cp=2, tp=2, ep=2, experts=ExpertLayout(chunks=chunks))
    sent = list(dispatched_tokens(plan))
    whole = plan.mathematics.global_sequences * plan.mathematics.sequence_length
    assert len(sent) == chunks * plan.num_microbatches * plan.mesh.world_size
    assert sorted(torch.cat(sent).tolist()) == list(range(whole))
