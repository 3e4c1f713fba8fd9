"""Every planted bug of experts and expert parallelism is caught and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Recompute, Zero
from echelon.launch.local.pool import RankPool
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.proof.planted import Planted, assert_caught

FIRST, LAST = "layers.0.mlp", "layers.1.mlp"
ROUTER = f"{LAST}.router.weight"
EXPERT = f"{LAST}.experts.3.down.weight"
AUX = Balance(kind="aux", aux_coefficient=0.1)
BY_SEQUENCE = replace(AUX, aux_over="sequence")
Z_LOSS = Balance(z_coefficient=0.01)
BIAS = Balance(kind="bias", bias_rate=0.05)
ONE_OF_EIGHT = replace(MIXTRAL, experts=Experts(num_experts=8, top_k=1, ffn=12))
EP2: dict[str, Any] = {"dp_shard": 2, "ep": 2}
WHOLE: dict[str, Any] = {"tp": 2, "ep": 2}
PIECES: dict[str, Any] = {
    "tp": 2,
    "dp_shard": 2,
    "ep": 2,
    "experts": ExpertLayout(expert_tp=2),
}


def routed(mutant: str, factor: str, axis: str, **plan: Any) -> Planted:
    """Return a bug that sends tokens elsewhere in the layers above it."""
    tensor, step = plan.pop("tensor", FIRST), plan.pop("step", 0)
    rule = plan.pop("rule", "prove-routes")
    plan = {"model": MIXTRAL, **plan}
    return Planted(f"experts:{mutant}", rule, tensor, factor, axis, step, plan, of=plan_of)


def gradient(mutant: str, tensor: str, factor: str, axis: str, **plan: Any) -> Planted:
    """Return a bug in gradients alone."""
    step, rule = plan.pop("step", 0), plan.pop("rule", "prove-gradients")
    plan = {"model": MIXTRAL, **plan}
    where = f"experts_gradients:{mutant}"
    return Planted(where, rule, tensor, factor, axis, step, plan, of=plan_of)


PLANTED = (
    routed("gates_twice", "gates twice", "ep", **EP2),
    routed("gates_twice", "gates twice", "ep", **PIECES),
    routed(
        "bias_in_gates",
        "bias in gates",
        "",
        tensor=LAST,
        step=1,
        rule="prove-microbatch-loss",
        model=DEEPSEEK,
        balance=BIAS,
        **WHOLE,
    ),
    routed("combined_in_wrong_order", "order", "ep", **EP2),
    routed("combined_in_wrong_order", "order", "ep", **PIECES),
    routed("combined_unsorted", "order", "ep", **WHOLE),
    routed("remote_experts_lost", "zero", "ep", **EP2),
    routed("local_capacity", "local drops", "cp", cp=2, ep=2, balance=Balance(capacity_factor=1.0)),
    routed("local_capacity", "local drops", "tp", balance=Balance(capacity_factor=1.0), **WHOLE),
    routed(
        "local_bias_update",
        "local loads",
        "dp",
        tensor=ROUTER,
        rule="prove-router-biases",
        model=DEEPSEEK,
        balance=BIAS,
        **EP2,
    ),
    routed(
        "loads_of_data_ranks",
        "missing sum",
        "tp",
        tensor=f"{FIRST}.router.weight",
        rule="prove-expert-loads",
        **WHOLE,
    ),
    routed(
        "initial_experts_of_rank_0",
        "experts permuted",
        "ep",
        tensor=f"{FIRST}.experts.2.gate.weight",
        step=-1,
        rule="prove-initial-weights",
        **EP2,
    ),
    routed(
        "losses_of_each_rank",
        "tp",
        "tp",
        tensor=f"{FIRST}.router.weight",
        rule="prove-router-losses",
        balance=AUX,
        microbatches=3,
        **WHOLE,
    ),
    routed(
        "recomputed_without_biases",
        "routed anew",
        "",
        tensor=f"{LAST}.router",
        step=1,
        model=DEEPSEEK,
        balance=BIAS,
        recompute=Recompute(policy="full"),
        **EP2,
    ),
    routed(
        "recomputed_without_biases_unseen",
        "routed anew",
        "",
        tensor=f"{LAST}.experts.7.down.weight",
        step=1,
        rule="prove-gradients",
        model=DEEPSEEK,
        balance=BIAS,
        recompute=Recompute(policy="full"),
        **EP2,
    ),
    gradient(
        "slices_reversed",
        EXPERT,
        "slices permuted",
        "edp_shard",
        dp_shard=4,
        ep=2,
        experts=ExpertLayout(zero_stage=2),
    ),
    gradient(
        "stale_gathered_experts",
        f"{LAST}.experts.0.gate.weight",
        "stale",
        "edp_shard",
        step=1,
        rule="prove-microbatch-loss",
        dp_shard=4,
        ep=2,
        zero=Zero(stage=3),
        experts=ExpertLayout(zero_stage=3),
    ),
    gradient("losses_forgotten", ROUTER, "zero", "", step=1, balance=AUX, **EP2),
    gradient("losses_times_tp", ROUTER, "tp", "tp", balance=Z_LOSS, microbatches=3, **WHOLE),
    gradient("divided_by_data_ranks", EXPERT, "1/dp", "dp", dp_shard=4, ep=2),
    gradient("summed_over_data_ranks", EXPERT, "wrong group", "ep", **EP2),
    gradient("experts_not_summed", EXPERT, "missing sum", "edp", dp_shard=4, ep=2),
    gradient("losses_times_tp", ROUTER, "tp", "tp", step=1, balance=AUX, microbatches=3, **WHOLE),
    gradient("losses_times_dp", ROUTER, "dp", "dp", step=1, balance=AUX, dp_shard=4, ep=2),
    gradient(
        "losses_times_microbatches",
        ROUTER,
        "microbatches",
        "microbatches",
        step=1,
        balance=AUX,
        pp=2,
        microbatches=3,
        **EP2,
    ),
    gradient(
        "local_shares",
        f"{FIRST}.router.weight",
        "local shares",
        "cp",
        rule="prove-router-losses",
        cp=2,
        ep=2,
        balance=BY_SEQUENCE,
    ),
    gradient(
        "local_shares",
        f"{FIRST}.router.weight",
        "local shares",
        "tp",
        rule="prove-router-losses",
        balance=replace(AUX, aux_over="microbatch"),
        **WHOLE,
    ),
    gradient(
        "shares_of_own_loads",
        ROUTER,
        "local shares",
        "dp and tp",
        step=1,
        balance=AUX,
        dp_shard=2,
        **WHOLE,
    ),
    gradient("router_not_summed", ROUTER, "missing sum", "tp", balance=AUX, **WHOLE),
    gradient("gates_of_one_piece", ROUTER, "missing sum", "tp", **PIECES),
    gradient(
        "idle_experts_keep_gradients",
        f"{LAST}.experts.0.down.weight",
        "stale",
        "",
        step=1,
        model=ONE_OF_EIGHT,
        **WHOLE,
    ),
    gradient(
        "norm_without_remote_experts",
        "gradient norm",
        "partial norm",
        "ep",
        rule="prove-gradient-norm",
        **EP2,
    ),
    gradient(
        "experts_counted_on_all_ranks",
        "gradient norm",
        "partial norm",
        "tp",
        rule="prove-gradient-norm",
        tp=4,
        ep=2,
    ),
    gradient(
        "slices_by_dense_index",
        f"{FIRST}.experts.0.gate.weight",
        "doubled",
        "edp_shard",
        rule="prove-nothing-dropped",
        dp_shard=4,
        ep=2,
        zero=Zero(stage=1),
        experts=ExpertLayout(zero_stage=1),
    ),
)

OTHERS = (
    Planted(
        "context:lse_not_rescaled",
        "prove-routes",
        "layers.0.attention",
        "merge",
        "cp",
        plan={"model": MIXTRAL, "cp": 2, "ep": 2, "balance": AUX},
        of=plan_of,
    ),
    Planted(
        "pipelines:gradients_swapped",
        "prove-gradients",
        f"{LAST}.experts.3.down.weight",
        "order",
        "pp",
        plan={"model": replace(MIXTRAL, layers=4), "pp": 2, "balance": BY_SEQUENCE, **EP2},
        of=plan_of,
    ),
)
"""Bugs of other parts, in a model with experts whose routers have losses."""


@pytest.mark.parametrize("planted", [*PLANTED, *OTHERS], ids=lambda planted: planted.mutant)
def test_a_planted_bug_of_experts_is_caught_and_named(
    planted: Planted, rank_pool: RankPool
) -> None:
    assert_caught(planted, rank_pool)
