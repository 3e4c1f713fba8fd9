"""What of a step is data: loads of experts, pieces of attention."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.plan import Plan
from echelon.proof.oracle.batches import global_batch
from echelon.proof.subject import ReportedRoute, ReportedRouting, ReportedRoutingSummary
from tests.parallel.layouts import MIXTRAL, NANO, plan_of
from tests.walks.plans.bytes_recorded import (
    MEASURED_STEP,
    RankBytes,
    step_data,
)

NONE = ReportedRoutingSummary(assignments=0, dropped=0, aux_loss=0.0, z_loss=0.0, imbalance=1.0)


def test_the_output_of_the_plain_kernel_alone_is_copied() -> None:
    plan = plan_of(microbatch_sequences=2)
    capped = plan_of(microbatch_sequences=2, model=replace(NANO, soft_cap=2.0))
    assert set(step_data(plan, 0, ()).transposed.values()) == {0}
    assert set(step_data(capped, 0, ()).transposed.values()) == {1}


def routed(plan: Plan, chosen: tuple[int, int]) -> RankBytes:
    """Return the record of a rank that sent all tokens to two experts, with no room for one."""
    ids = global_batch(plan, MEASURED_STEP).sample_ids
    length = plan.mathematics.sequence_length
    tokens = [sample * length + position for sample in ids for position in range(length)]
    routes = [
        ReportedRoute(
            layer=layer,
            microbatch=0,
            tokens=tokens,
            chosen=[chosen] * len(tokens),
            kept=[(True, False)] * len(tokens),
        )
        for layer in range(plan.model.layers)
        if plan.model.layer_has_experts(layer)
    ]
    said = ReportedRouting(routes=routes, loads={}, summary=NONE, biases={}, shares={})
    return RankBytes(sent={}, held={}, skipped=False, actions=(), stored_bytes=0, routing=said)


def test_the_load_of_experts_is_that_of_the_tokens_that_had_room() -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=2, ep=2)
    load = step_data(plan, 0, [routed(plan, (3, 1))]).load
    assert load is not None
    counts = [load.counts(crossing) for crossing in load.choices]
    tokens = plan.layout.microbatch_sequences * plan.mathematics.sequence_length
    assert len(counts) == plan.model.layers * plan.num_microbatches
    # Of each pair the second expert had no room.
    assert all((one[:, 3] == tokens).all() and one.sum() == 2 * tokens for one in counts)
