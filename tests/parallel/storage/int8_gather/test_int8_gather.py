"""Row B05, qwZ of ZeRO++: matrices gathered in int8 are proven, exact in bytes, and bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.experts import ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan, Precision, Zero
from echelon.cost.bytes.sent import bytes_sent
from echelon.launch.local.supervisor import RankPool
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from echelon.parallel.storage.buckets import Int8Message, block_codes, block_scales
from echelon.parallel.tensor_memory import OwnedTensorMemory
from echelon.proof.oracle.fp8 import as_gathered
from echelon.proof.run import prove
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, NANO, QWEN, plan_of
from tests.parallel.secondary.nodes import on_nodes
from tests.parallel.targets import train
from tests.proof.layouts import BF16, Changes, layout
from tests.walks.plans.bytes_walk import compare_plan

ZERO: Changes = {"stage": 3, "gather": "int8"}
INT8: Changes = {"int8_block": 8}

CASES: dict[str, Changes] = {
    "dp3": {"dp": 3},
    "tp2": {"dp": 2, "tp": 2},
    "tp2 scattered": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "ring": {"mesh": {"cp": 2}, "dp": 2, "context": {"kind": "ring"}},
    "1f1b, tied": {"dp": 2, "pp": 2, "tied": True},
    "zb-h1": {"dp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "learned positions": {"dp": 2, "tp": 2, "model": {"positions": "learned"}},
    "replicas": {"mesh": {"dp_replicate": 2}, "dp": 2},
    "kept whole until the end of the step": {
        "dp": 2,
        "zero": {**ZERO, "reshard_after_forward": False},
    },
    "slices add up": {"dp": 2, "zero": {**ZERO, "accumulate": "slices", "unit_blocks": 2}},
    "on the host": {"dp": 2, "zero": {**ZERO, "parameter_offload": "host"}},
}


def require_proven(plan: Plan, rank_pool: RankPool, *, late: bool = False) -> None:
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False, late=late)
    proof.require()
    shrunk = proof.shrunk_plan
    assert any(one.int8_blocks for one in plan_buckets(shrunk, rank_part(shrunk, 0)))
    claims = proof.passes[0].claims
    assert max(claim.max_error for claim in claims) <= 1e-10
    assert [c.max_error for c in claims if c.rule.id == "prove-bytes-sent"] == [0.0]


@pytest.mark.system("B05")
@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    require_proven(layout(**{"zero": ZERO, **CASES[name]}, precision=INT8), rank_pool)


@pytest.mark.slow
def test_secondary_slices_of_what_was_rounded_are_proven(rank_pool: RankPool) -> None:
    plan = layout(dp=4, pp=2, zero={**ZERO, "secondary": True}, precision=INT8)
    require_proven(on_nodes(plan, 2), rank_pool, late=True)


@pytest.mark.slow
def test_bfloat16_is_proven_without_rounding_and_runs_with_it(rank_pool: RankPool) -> None:
    plan = layout(dp=2, zero=ZERO, precision={**BF16, **INT8})
    proof = prove(plan, run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "bf16"]


WIDE = replace(NANO, hidden=32, heads=8, kv_heads=4, ffn=48)
ROUNDED = Precision(parameters="bf16", int8_block=4)
MESSAGES = Zero(stage=3, gather="int8", accumulate="slices")

SHARED = replace(DEEPSEEK.experts or Experts(num_experts=8, top_k=3, ffn=16), ffn=16)
"""Experts of a width that two tensor ranks cut in whole blocks."""

STEPS: dict[str, Plan] = {
    "three slices": plan_of(model=WIDE, dp_shard=3, precision=ROUNDED, zero=MESSAGES),
    "tp2, tied": plan_of(
        model=replace(QWEN, hidden=32, ffn=48), dp_shard=2, tp=2, precision=ROUNDED, zero=MESSAGES
    ),
    "replicas, float32": plan_of(
        model=WIDE, dp=2, dp_shard=2, precision=Precision(int8_block=16), zero=MESSAGES
    ),
    "once a step": plan_of(
        model=WIDE,
        dp_shard=2,
        pp=2,
        precision=ROUNDED,
        zero=replace(MESSAGES, reshard_after_forward=False),
    ),
    "2x2, secondary": on_nodes(
        plan_of(model=WIDE, dp_shard=4, precision=ROUNDED, zero=replace(MESSAGES, secondary=True)),
        2,
    ),
    "experts": plan_of(
        model=MIXTRAL,
        dp_shard=4,
        ep=2,
        precision=ROUNDED,
        zero=MESSAGES,
        experts=ExpertLayout(zero_stage=3),
    ),
    "shared experts, tp2": plan_of(
        model=replace(DEEPSEEK, hidden=32, experts=SHARED),
        dp_shard=2,
        ep=2,
        tp=2,
        precision=ROUNDED,
        zero=MESSAGES,
        experts=ExpertLayout(zero_stage=3),
    ),
}


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", STEPS)
def test_bytes_sent_and_held_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(STEPS[name], rank_pool.run)
    assert found.problems == ()
    assert found.sent > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "shared experts, tp2"])
def test_experts_are_proven(name: str, rank_pool: RankPool) -> None:
    require_proven(STEPS[name], rank_pool)


def test_a_gather_sends_a_byte_of_a_number_and_its_share_of_a_scale() -> None:
    plain = replace(MESSAGES, gather="parameters")
    precision = replace(ROUNDED, int8_block=16)
    plan = plan_of(model=WIDE, dp_shard=2, precision=precision, zero=MESSAGES)
    whole = plan_of(model=WIDE, dp_shard=2, precision=Precision(parameters="bf16"), zero=plain)
    buckets = plan_buckets(plan, rank_part(plan, 0))
    matrices = sum(bucket.num_elements for bucket in buckets if bucket.int8_blocks)

    def forward(one: Plan) -> int:
        return sum(term.each for term in bytes_sent(one, 0) if term.name.endswith("forward"))

    assert forward(whole) - forward(plan) == matrices // 2 * 2 - matrices // 2 * (16 + 4) // 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_number_is_off_by_more_than_half_a_scale(dtype: torch.dtype) -> None:
    values = torch.randn(6 * 32, dtype=torch.float64).to(dtype)
    values[32:40] = 0.0
    message = Int8Message(
        whole=(whole := torch.empty(0, dtype=torch.uint8)),
        memory=OwnedTensorMemory(whole),
        block=8,
        dtype=dtype,
    )
    pieces = torch.cat([message.piece(part) for part in values.chunk(3)])
    message = replace(message, whole=pieces)
    found = torch.empty_like(values)
    message.write_values(found, 3)
    assert torch.equal(found, as_gathered("w", values.view(6, 32), 8).view(-1))
    blocks = values.view(-1, 8).to(message.scale_dtype)
    scales = block_scales(blocks)
    assert block_codes(blocks, scales).abs().max() == 127
    roundoff = torch.finfo(dtype).eps * blocks.abs()
    errors = (found.view(-1, 8).to(blocks.dtype) - blocks).abs()
    assert bool((errors <= scales[:, None] * (0.5 + 2**-20) + roundoff).all())
    assert bool((found[32:40] == 0).all())


def test_what_is_not_finite_is_seen() -> None:
    values = torch.ones(16)
    values[3], values[9] = torch.inf, torch.nan
    empty = torch.empty(0, dtype=torch.uint8)
    message = Int8Message(
        whole=empty, memory=OwnedTensorMemory(empty), block=4, dtype=torch.float32
    )
    message = replace(message, whole=message.piece(values))
    found = torch.empty_like(values)
    message.write_values(found, 1)
    for seen in (found, as_gathered("w", values.view(1, 16), 4)):
        assert seen.view(4, 4).isnan().any(1).tolist() == [True, False, True, False]


def test_the_loss_stays_near(rank_pool: RankPool) -> None:
    rounded = plan_of(model=WIDE, dp_shard=2, precision=Precision(int8_block=16), zero=MESSAGES)
    precision = replace(rounded.mathematics.precision, int8_block=0)
    zero = replace(MESSAGES, gather="parameters")
    plain = replace(
        rounded,
        mathematics=replace(rounded.mathematics, precision=precision),
        layout=replace(rounded.layout, zero=zero),
    )
    one, other = (rank_pool.run(train, (plan, 6), 2)[0].losses for plan in (rounded, plain))
    assert one != other
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_piece_need_not_be_whole_scales_long(dtype: torch.dtype, pieces: int) -> None:
    """The bytes of a single rank are 3 codes behind a scale of 4 or 8 bytes."""
    values = torch.arange(1.0, 3 * pieces + 1, dtype=dtype)
    size = pieces * (torch.finfo(dtype).bits // 8 + 3)
    whole = torch.zeros(size, dtype=torch.uint8)
    message = Int8Message(whole=whole, memory=OwnedTensorMemory(whole), block=3, dtype=dtype)
    whole.copy_(torch.cat([message.piece(one) for one in values.view(pieces, 3)]))
    gathered = torch.zeros_like(values)
    message.write_values(gathered, pieces)
    assert torch.allclose(gathered, values, rtol=0.05)
