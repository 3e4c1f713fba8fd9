"""A plan that was changed by hand is checked for its experts before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.config.load import load_job
from echelon.config.rules.finders import plan_problems, require_trainable
from echelon.core.errors import InfeasiblePlan
from echelon.core.plan import Plan

MODEL = (
    "model.experts.num_experts=8",
    "model.experts.top_k=2",
    "model.experts.ffn=96",
    "mesh.dp_shard=4",
    "mesh.ep=4",
)
PLAN = load_job("nano", MODEL).plan
LATENT = load_job("deepseek-v3").plan


def meshed(**degrees: int) -> Plan:
    return replace(PLAN, layout=replace(PLAN.layout, mesh=replace(PLAN.mesh, **degrees)))


def laid_out(**changes: Any) -> Plan:
    experts = replace(PLAN.layout.experts, **changes)
    return replace(PLAN, layout=replace(PLAN.layout, experts=experts))


def balanced(**changes: Any) -> Plan:
    numbers = PLAN.mathematics
    balance = replace(numbers.balance, **changes)
    return replace(PLAN, mathematics=replace(numbers, balance=balance))


def shaped(plan: Plan, **changes: Any) -> Plan:
    model = replace(plan.model, **changes)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def with_experts(**changes: Any) -> Plan:
    assert PLAN.model.experts is not None
    return shaped(PLAN, experts=replace(PLAN.model.experts, **changes))


@pytest.mark.parametrize(
    ("plan", "rule", "works"),
    [
        (meshed(ep=3), "ep-divides-experts", "mesh.ep = 2"),
        (meshed(ep=8), "ep-divides-ranks", "mesh.ep = 4"),
        (meshed(dp_shard=1, dp_replicate=4), "ep-divides-ranks", "mesh.ep = 1"),
        (laid_out(expert_tp=2), "expert-tp-is-one-or-tp", "experts.expert_tp = 1"),
        (laid_out(padded=True), "padded-needs-capacity", "experts.padded = false"),
        (laid_out(dispatch="two-hop"), "two-hop-needs-nodes", 'experts.dispatch = "flat"'),
        (laid_out(chunks=7), "chunks-divide-tokens", "experts.chunks = 8"),
        (laid_out(chunks=0), "out-of-range", "1"),
        (laid_out(zero_stage=4), "out-of-range", "3"),
        (laid_out(dispatch="three-hop"), "unknown-choice", '"two-hop"'),
        (balanced(capacity_factor=-1.0), "out-of-range", '"dropless"'),
        (balanced(capacity_factor=0.01), "capacity-holds-tokens", "experts.capacity_factor = 1.0"),
        (balanced(kind="bias"), "bias-balance-has-bias", "model.experts.router_bias = true"),
        (balanced(kind="sinkhorn"), "unknown-choice", '"aux"'),
        (with_experts(groups=3), "groups-divide-experts", "model.experts.groups = 2"),
        (with_experts(top_k=9), "experts-enough", "model.experts.top_k = 8"),
        (
            with_experts(groups=4, top_k=4),
            "top-groups-hold-top-k",
            "model.experts.top_groups = 2",
        ),
        (
            with_experts(first_dense_layers=4),
            "experts-enough",
            "model.experts.first_dense_layers = 3",
        ),
        (
            with_experts(top_k=1),
            "renormalised-gates-differ",
            "model.experts.renormalise = false",
        ),
        (shaped(PLAN, mlp_bias=True), "experts-have-no-bias", "model.mlp_bias = false"),
        (
            shaped(PLAN, gated=False),
            "experts-are-gated",
            'model.gated = true with model.activation = "silu"',
        ),
        (shaped(PLAN, experts=None), "no-effect", "mesh.ep = 1"),
        (shaped(LATENT, kv_heads=64), "latent-heads-have-keys", "model.kv_heads = 128"),
        (shaped(LATENT, head_dim=128), "latent-head-has-two-parts", "model.head_dim = 192"),
        (shaped(LATENT, qk_norm=True), "latent-attention-is-plain", "model.qk_norm = false"),
    ],
)
def test_what_was_changed_by_hand_is_found(plan: Plan, rule: str, works: str) -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        require_trainable(plan)
    found = {problem.rule: problem for problem in caught.value.problems}
    assert rule in found
    assert works in found[rule].suggestions
    assert found[rule].set_by == ""


@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        (laid_out(dispatch="two-hop", chunks=2), {"experts.dispatch", "experts.chunks"}),
        (laid_out(zero_stage=1), {"experts.zero_stage"}),
        (balanced(kind="aux", aux_coefficient=0.1), {"experts.balance", "experts.aux_coefficient"}),
        (balanced(capacity_factor=1.25), {"experts.capacity_factor"}),
        (balanced(), set()),
    ],
)
def test_a_dense_plan_says_nothing_of_experts(plan: Plan, keys: set[str]) -> None:
    one_rank = replace(plan.layout, mesh=replace(plan.mesh, ep=1))
    dense = replace(shaped(plan, experts=None), layout=one_rank)
    found = list(plan_problems(dense))
    assert {problem.key for problem in found} == keys
    assert {problem.rule for problem in found} <= {"no-effect"}
    assert all(len(problem.suggestions) == 1 for problem in found)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        LATENT,
        meshed(ep=1),
        meshed(ep=2),
        laid_out(chunks=2),
        laid_out(zero_stage=1),
        balanced(kind="aux", aux_over="sequence"),
        with_experts(top_k=1, renormalise=False),
        balanced(capacity_factor=1.25, drop="score"),
        load_job("gpt2").plan,
        load_job("nano", ["mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3"]).plan,
        load_job("nano", [*MODEL[:3], "mesh.pp=2", "pipeline.schedule=dualpipe-v"]).plan,
    ],
)
def test_a_plan_that_fits_has_no_problem(plan: Plan) -> None:
    assert list(plan_problems(plan)) == []
    require_trainable(plan)


def test_where_a_value_was_set_is_told_where_it_is_known() -> None:
    job = load_job("nano", MODEL)
    with pytest.raises(InfeasiblePlan) as caught:
        require_trainable(meshed(ep=3), job.sources)
    assert {problem.set_by for problem in caught.value.problems} == {"--set mesh.ep=4"}


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ((2, 2), ""),
        ((1, 4), "are on one node of 4 devices"),
        ((4, 1), "each is on a node of its own"),
        ((2, 3), "are spread unevenly over nodes of 3 devices: 3 + 1"),
    ],
)
def test_two_hops_are_judged_by_the_cluster_of_the_plan(nodes: tuple[int, int], says: str) -> None:
    cluster = replace(PLAN.cluster, nodes=nodes[0], devices_per_node=nodes[1])
    found = list(plan_problems(replace(laid_out(dispatch="two-hop"), cluster=cluster)))
    assert [problem.rule for problem in found] == (["two-hop-needs-nodes"] if says else [])
    assert all(says in problem.message for problem in found)
