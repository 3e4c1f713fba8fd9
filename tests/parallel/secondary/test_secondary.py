"""Row B05, hpZ of ZeRO++: secondary slices give the same bits, bytes by tier, and proofs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Precision, Recompute
from echelon.cost.bytes.sent import bytes_sent, bytes_sent_by_axis, parameter_gather_tiers
from echelon.launch.local.supervisor import RankPool
from echelon.layout.data_groups import node_groups, secondary_degree
from echelon.proof.run import prove
from tests.parallel.layouts import MIXTRAL, NANO, QWEN, plan_of
from tests.parallel.one_device import assemble
from tests.parallel.secondary.nodes import (
    SECONDARY,
    gathers_by_tier,
    node_layout,
    on_nodes,
    without_secondary,
)
from tests.parallel.targets import train
from tests.proof.layouts import BF16, Changes
from tests.walks.plans.bytes_walk import compare_plan

WIDE = replace(NANO, hidden=32, heads=8, kv_heads=4, ffn=48)
WHOLE_SUMS = replace(SECONDARY, accumulate="whole")
CODES = Precision(parameters="bf16", matmul="fp8", fp8_block=4)

STEPS: dict[str, Plan] = {
    "2x2": on_nodes(plan_of(dp_shard=4, zero=SECONDARY), 2),
    "2x4": on_nodes(plan_of(dp_shard=8, zero=SECONDARY, model=QWEN), 4),
    "3x2, sums once a step": on_nodes(plan_of(dp_shard=6, zero=WHOLE_SUMS, microbatches=3), 2),
    "one microbatch": on_nodes(plan_of(dp_shard=4, zero=SECONDARY, microbatches=1), 2),
    "1f1b": on_nodes(plan_of(dp_shard=4, pp=2, zero=SECONDARY, microbatches=4), 2),
    "dualpipe": on_nodes(
        plan_of(dp_shard=4, pp=2, zero=SECONDARY, schedule="dualpipe", microbatches=4), 2
    ),
    "tied, both ends on a rank": on_nodes(
        plan_of(dp_shard=4, pp=2, zero=SECONDARY, schedule="zb-v", virtual_stages=2, model=QWEN), 2
    ),
    "tp2 scattered": on_nodes(
        plan_of(dp_shard=4, tp=2, zero=SECONDARY, model=QWEN, sequence_parallel=True), 4
    ),
    "cp2": on_nodes(plan_of(dp_shard=2, cp=2, zero=SECONDARY), 2),
    "replicas": on_nodes(plan_of(dp=2, dp_shard=4, zero=SECONDARY), 2),
    "prefetch, two blocks a unit": on_nodes(
        plan_of(dp_shard=4, zero=replace(SECONDARY, prefetch=2, unit_blocks=2)), 2
    ),
    "nothing ahead, small ones whole": on_nodes(
        plan_of(dp_shard=4, zero=replace(SECONDARY, prefetch=0, keep_whole_below=100)), 2
    ),
    "recompute": on_nodes(
        plan_of(dp_shard=4, zero=SECONDARY, recompute=Recompute(policy="full")), 2
    ),
    "on the host": on_nodes(
        plan_of(
            dp_shard=4,
            zero=replace(SECONDARY, optimizer_offload="host", parameter_offload="host"),
        ),
        2,
    ),
    "experts": on_nodes(
        plan_of(
            model=MIXTRAL, dp_shard=8, ep=2, zero=SECONDARY, experts=ExpertLayout(zero_stage=3)
        ),
        4,
    ),
    "experts, one of a kind on a node": on_nodes(
        plan_of(
            model=MIXTRAL, dp_shard=4, ep=2, zero=SECONDARY, experts=ExpertLayout(zero_stage=3)
        ),
        2,
    ),
    "codes": on_nodes(
        plan_of(model=WIDE, dp_shard=4, precision=CODES, zero=replace(SECONDARY, gather="fp8")),
        2,
    ),
}


@pytest.mark.system("B05")
def test_the_ranks_of_a_node_hold_the_slices() -> None:
    plan = STEPS["tp2 scattered"]
    assert secondary_degree(plan) == 2
    assert node_groups(plan) == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert node_groups(without_secondary(plan)) == ()
    assert [secondary_degree(STEPS["experts"], expert=one) for one in (False, True)] == [4, 2]
    alone = STEPS["experts, one of a kind on a node"]
    assert [secondary_degree(alone, expert=one) for one in (False, True)] == [2, 1]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_bit_for_bit_those_without(name: str, rank_pool: RankPool) -> None:
    plan = STEPS[name]
    size = plan.mesh.world_size
    kept, plain = (rank_pool.run(train, (one, 3), size) for one in (plan, without_secondary(plan)))
    for one, other in zip(kept, plain, strict=True):
        assert one.losses == other.losses
    values, expected = (
        assemble(plan, [rank.parameters for rank in ranks]) for ranks in (kept, plain)
    )
    assert values.keys() == expected.keys()
    for parameter, value in values.items():
        assert torch.equal(value, expected[parameter]), parameter


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", STEPS)
def test_bytes_sent_and_held_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(STEPS[name], rank_pool.run)
    assert found.problems == ()
    assert found.sent > 0
    assert found.held > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2x2", "2x4", "1f1b", "cp2", "tp2 scattered", "experts"])
def test_messages_of_gathers_take_the_bytes_of_each_tier(name: str, rank_pool: RankPool) -> None:
    plan = STEPS[name]
    for one in (plan, without_secondary(plan)):
        found = rank_pool.run(gathers_by_tier, one, one.mesh.world_size)
        assert found == [parameter_gather_tiers(one, rank) for rank in range(len(found))]


@pytest.mark.parametrize("name", ["2x2", "2x4", "1f1b"])
def test_only_the_first_gather_of_a_step_leaves_a_node(name: str) -> None:
    plan = STEPS[name]
    gathers = 2 * plan.num_microbatches
    near, far = parameter_gather_tiers(plan, 0)
    plain_near, plain_far = parameter_gather_tiers(without_secondary(plan), 0)
    assert near > plain_near
    # But the embedding, which backward does not read.
    assert plain_far / gathers <= far < plain_far / (gathers - 1)
    within = [term for term in bytes_sent(plan, 0) if term.axis == "dp_shard_within"]
    assert {term.name for term in within} == {
        "parameters forward, in nodes",
        "parameters backward, in nodes",
    }
    assert sum(term.bytes for term in within) == bytes_sent_by_axis(plan, 0)["dp_shard_within"]


PROVEN: dict[str, Changes] = {
    "2x2": {"dp": 4, "each": 2},
    "2x4": {"dp": 8, "each": 4},
    "2x2, sums once a step": {"dp": 4, "each": 2, "zero": {"accumulate": "whole"}},
    "2x2, sums of microbatches": {"dp": 4, "each": 2, "zero": {"accumulate": "slices"}},
    "pipeline": {"dp": 4, "pp": 2, "each": 2, "schedule": "zb-h1"},
    "2x4, pipeline on nodes": {"dp": 4, "pp": 2, "each": 2, "recompute": "full"},
    "tensor": {"dp": 4, "tp": 2, "each": 4},
    "sequence": {"dp": 4, "tp": 2, "each": 4, "sequence_parallel": True},
    "host": {"dp": 4, "each": 2, "zero": {"parameter_offload": "host"}},
    "files": {
        "dp": 8,
        "each": 4,
        "zero": {"parameter_offload": "nvme", "optimizer_offload": "nvme"},
    },
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", PROVEN)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    proof = prove(node_layout(**PROVEN[name]), run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert secondary_degree(proof.shrunk_plan) > 1
    claims = proof.passes[0].claims
    assert max(claim.max_error for claim in claims) <= 1e-10
    assert [c.max_error for c in claims if c.rule.id == "prove-bytes-sent"] == [0.0]


@pytest.mark.slow
def test_bfloat16_is_proven_though_all_completes_late(rank_pool: RankPool) -> None:
    plan = node_layout(dp=4, pp=2, each=2, schedule="zb-h1", precision=BF16)
    prove(plan, run_ranks=rank_pool.run, late=True).require()
