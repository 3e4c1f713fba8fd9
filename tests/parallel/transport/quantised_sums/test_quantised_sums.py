"""Row B05, qgZ of ZeRO++: rounded sums keep to bounds, tensor by tensor, and to their bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Precision, ReduceKind, Zero
from echelon.cost.bytes.quantised import REDUCE_BLOCK, message_bytes
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.data_groups import across_groups, hop_degrees, node_groups
from echelon.layout.stage import rank_part
from echelon.parallel.transport.quantised_sums import BlockCodes
from echelon.proof.run import prove
from tests.parallel.layouts import MIXTRAL, NANO, plan_of
from tests.parallel.secondary.nodes import on_nodes
from tests.parallel.targets import train
from tests.proof.layouts import Changes, layout
from tests.walks.plans.bytes_walk import compare_plan

CASES: dict[str, Changes] = {
    "2x2": {"dp": 4, "each": 2},
    "2x4, int4": {"dp": 8, "each": 4, "reduce": "int4"},
    "stage 1": {"dp": 4, "each": 2, "stage": 1},
    "stage 2, sums of microbatches": {"dp": 4, "each": 2, "stage": 2},
    "3x2": {"dp": 6, "each": 2, "reduce": "int4"},
    "pipeline, tied": {"dp": 4, "pp": 2, "each": 2, "tied": True},
    "sequence": {"dp": 4, "tp": 2, "each": 4, "sequence_parallel": True},
    "replicas": {"dp": 8, "each": 2, "mesh": {"dp_replicate": 2, "dp_shard": 4}},
    "host": {"dp": 4, "each": 2, "more": {"parameter_offload": "host"}},
    "all of it": {
        "dp": 4,
        "each": 2,
        "more": {"secondary": True, "gather": "int8"},
        "precision": {"int8_block": 8},
    },
}


def rounded_plan(
    *,
    each: int,
    stage: int = 3,
    reduce: ReduceKind = "int8",
    more: Changes | None = None,
    **chosen: Any,
) -> Plan:
    """Return a plan of the prover's tests on nodes, whose sums are rounded."""
    return on_nodes(layout(zero={"stage": stage, "reduce": reduce, **(more or {})}, **chosen), each)


@pytest.mark.system("B05")
@pytest.mark.quick("all of it")
@pytest.mark.parametrize("name", CASES)
def test_sums_are_within_their_bounds_and_all_else_is_proven(
    name: str, rank_pool: RankPool
) -> None:
    plan = rounded_plan(**CASES[name])
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    claims = {claim.rule.id: claim for claim in proof.passes[0].claims}
    sums = claims.pop("prove-quantised-sums")
    assert sums.compared > 0
    assert 0.01 < sums.max_error <= sums.allowed == 1.0
    assert max(claim.max_error for claim in claims.values()) <= 1e-10
    assert claims["prove-bytes-sent"].max_error == 0.0


STEPS: dict[str, Plan] = {
    "2x2": on_nodes(plan_of(dp_shard=4, zero=Zero(stage=3, accumulate="slices", reduce="int8")), 2),
    "2x4, stage 1, int4": on_nodes(plan_of(dp_shard=8, zero=Zero(stage=1, reduce="int4")), 4),
    "bfloat16, secondary": on_nodes(
        plan_of(
            dp_shard=4,
            pp=2,
            precision=Precision(parameters="bf16", gradients="bf16"),
            zero=Zero(stage=3, accumulate="slices", reduce="int8", secondary=True),
        ),
        2,
    ),
    "experts": on_nodes(
        plan_of(
            model=MIXTRAL,
            dp_shard=8,
            ep=2,
            zero=Zero(stage=2, accumulate="slices", reduce="int8"),
            experts=ExpertLayout(zero_stage=2),
        ),
        4,
    ),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", STEPS)
def test_bytes_sent_and_held_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(STEPS[name], rank_pool.run)
    assert found.problems == ()
    assert found.sent > 0


def test_hops_go_over_a_node_and_over_places() -> None:
    plan = STEPS["2x4, stage 1, int4"]
    assert hop_degrees(plan) == (4, 2)
    assert node_groups(plan) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert across_groups(plan) == ((0, 4), (1, 5), (2, 6), (3, 7))
    zero = replace(plan.layout.zero, reduce="exact")
    exact = replace(plan, layout=replace(plan.layout, zero=zero))
    assert hop_degrees(exact) == (1, 1)
    assert across_groups(exact) == node_groups(exact) == ()


def test_bytes_of_both_hops_are_those_that_the_formula_says() -> None:
    plan = STEPS["2x4, stage 1, int4"]
    slices = [slice_elements(plan, bucket) for bucket in plan_buckets(plan, rank_part(plan, 0))]
    each = sum(-(-count // 128) * (8 + 64) for count in slices)
    sent = bytes_sent_by_axis(plan, 0)
    assert sent["dp_shard_within"] == 3 * 2 * each
    assert sent["dp_shard_across"] == 1 * each
    assert message_bytes(REDUCE_BLOCK, "int8", 4) == 4 + 128


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("count", [1, 128, 300])
def test_a_number_comes_back_within_half_a_step(kind: ReduceKind, count: int) -> None:
    codes = BlockCodes(kind, torch.float32)
    values = torch.randn(3, count)
    message = codes.encode(values)
    assert message.shape == (3, message_bytes(count, kind, 4))
    found = codes.decode(message, count)
    for start in range(0, count, REDUCE_BLOCK):
        part = slice(start, start + REDUCE_BLOCK)
        steps = values[:, part].abs().amax(1) / {"int8": 127, "int4": 7}[kind]
        errors = (found[:, part] - values[:, part]).abs().amax(1)
        assert bool((errors <= steps / 2 * (1 + 1e-5)).all())
    zeros = torch.zeros(2, count)
    assert torch.equal(codes.decode(codes.encode(zeros), count), zeros)


def test_what_is_not_finite_stays_so() -> None:
    values = torch.ones(1, 200)
    values[0, 150] = torch.inf
    codes = BlockCodes("int8", torch.float32)
    (found,) = codes.decode(codes.encode(values), 200)
    assert bool(found[:128].isfinite().all())
    assert not bool(found[128:].isfinite().any())


@pytest.mark.slow
@pytest.mark.quick("int8-0.002")
@pytest.mark.parametrize(("kind", "most"), [("int8", 2e-3), ("int4", 3e-2)])
def test_the_loss_stays_near(kind: ReduceKind, most: float, rank_pool: RankPool) -> None:
    precision = Precision()
    rounded = on_nodes(
        plan_of(
            model=replace(NANO, hidden=32, heads=8, kv_heads=4, ffn=48),
            dp_shard=4,
            precision=precision,
            zero=Zero(stage=2, accumulate="slices", reduce=kind),
        ),
        2,
    )
    zero = replace(rounded.layout.zero, reduce="exact")
    exact = replace(rounded, layout=replace(rounded.layout, zero=zero))
    one, other = (rank_pool.run(train, (plan, 6), 4)[0].losses for plan in (rounded, exact))
    assert one != other
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < most
