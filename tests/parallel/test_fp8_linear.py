"""Products of 8-bit numbers under every parallelism: values, gradients, bytes, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.model_shape import LatentAttention, ModelShape
from echelon.core.plan import Plan, Precision, Recompute, RecomputedOperator
from echelon.launch.local.supervisor import RankPool
from echelon.models.decoder import Decoder
from echelon.models.modules import EmptyLinear
from echelon.parallel.fp8_linear import multiply_in_fp8
from echelon.proof.oracle.fp8 import rounded_to_fp8
from echelon.proof.run import prove
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.proof.layouts import BF16, Changes, layout
from tests.walks.plans.bytes_walk import compare_plan

FP8: Changes = {"matmul": "fp8", "fp8_block": 8}
SCATTERED: Changes = {"tp": 2, "sequence_parallel": True}
ZERO_BUBBLE: Changes = {"pp": 2, "schedule": "zb-h1"}

CASES: dict[str, Changes] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2 scattered": SCATTERED,
    "zb-h1": ZERO_BUBBLE,
    "zb-h1, tp2 scattered": {**ZERO_BUBBLE, **SCATTERED, "recompute": "full"},
    "zero 3": {"dp": 2, "zero": {"stage": 3}},
    "zero 3, tp2": {"dp": 2, "zero": {"stage": 3}, "tp": 2},
    "ring": {"mesh": {"cp": 2}, "context": {"kind": "ring"}},
    "ulysses, tp2 scattered": {
        **SCATTERED,
        "mesh": {"cp": 2},
        "context": {"kind": "ulysses", "ulysses_degree": 2},
    },
    "biases": {**SCATTERED, "model": {"qkv_bias": True, "output_bias": True, "mlp_bias": True}},
    "no gate": {"tp": 2, "model": {"gated": False, "activation": "gelu"}},
    "recompute": {**SCATTERED, "recompute": "full"},
    "selective": {**SCATTERED, "recompute": "selective"},
}


def latent(plan: Plan) -> Plan:
    """Return a plan whose heads come out of narrow vectors."""
    shape = LatentAttention(query_rank=24, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
    model = replace(plan.model, latent=shape, head_dim=16, kv_heads=plan.model.heads)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def require_proven(plan: Plan, rank_pool: RankPool) -> None:
    proof = prove(plan, run_ranks=rank_pool.run, own_precision=False)
    proof.require()
    assert proof.shrunk_plan.mathematics.precision.is_fp8
    claims = proof.passes[0].claims
    assert all(claim.compared > 0 for claim in claims)
    assert max(claim.max_error for claim in claims) <= 1e-10
    sent = [claim.max_error for claim in claims if claim.rule.id == "prove-bytes-sent"]
    assert sent == ([0.0] if proof.mesh != "1" else [])


@pytest.mark.system("B09")
@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CASES)
def test_float64_is_proven(name: str, rank_pool: RankPool) -> None:
    require_proven(layout(**CASES[name], precision=FP8), rank_pool)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [SCATTERED, {"tp": 2, **ZERO_BUBBLE}])
def test_latent_attention_is_proven(changes: Changes, rank_pool: RankPool) -> None:
    # A token that comes twice meets the same values, sums of few digits, with weights that add up
    # to 1 but for rounding: some of what it makes of them are ties.
    require_proven(latent(layout(**changes, precision=FP8)), rank_pool)


@pytest.mark.slow
@pytest.mark.system("B09")
def test_bfloat16_is_proven_with_products_of_both_kinds(rank_pool: RankPool) -> None:
    plan = layout(**SCATTERED, precision={**BF16, **FP8})
    proof = prove(plan, run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "bf16", "bf16, fp8"]


@pytest.mark.slow
def test_float32_is_proven_with_its_own_products(rank_pool: RankPool) -> None:
    proof = prove(layout(tp=2, precision=FP8), run_ranks=rank_pool.run)
    proof.require()
    assert [one.precision for one in proof.passes] == ["fp64", "fp32"]


WIDE = replace(NANO, hidden=32, heads=8, kv_heads=4, ffn=48)
PRECISION = Precision(parameters="bf16", matmul="fp8", fp8_block=8)


def fp8_plan(changes: Changes) -> Plan:
    """Return a plan of wider heads, in 8 bits."""
    defaults: Changes = {"model": WIDE, "precision": PRECISION, "microbatch_sequences": 2}
    return plan_of(**{**defaults, **changes})


def wider(model: ModelShape) -> ModelShape:
    return replace(model, hidden=32, heads=8, kv_heads=min(8, 2 * model.kv_heads), ffn=48)


def redone(*operators: RecomputedOperator) -> Recompute:
    return Recompute(policy="selective", operators=operators)


BYTES: dict[str, Changes] = {
    "one": {},
    "fp32": {"precision": replace(PRECISION, parameters="fp32")},
    "tp2": {"tp": 2},
    "tp2 scattered": SCATTERED,
    "zb-h1, tp2 scattered": {**SCATTERED, "schedule": "zb-h1", "pp": 2},
    "zero 3": {"dp_shard": 2},
    "ring": {"cp": 2},
    "biases, no gate": {"model": wider(GPT2), "tp": 2},
    "norms of heads": {"model": wider(QWEN), **SCATTERED},
    "full": {**SCATTERED, "recompute": Recompute(policy="full")},
    "attention again": {**SCATTERED, "recompute": redone("attention")},
    "norm and activation again": {**SCATTERED, "recompute": redone("norm", "activation")},
    "all again": {**SCATTERED, "recompute": redone("norm", "mlp", "attention")},
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", BYTES)
def test_bytes_sent_held_and_kept_are_those_of_the_formulas(name: str, rank_pool: RankPool) -> None:
    found = compare_plan(fp8_plan(BYTES[name]), rank_pool.run)
    assert found.problems == ()
    assert found.kept > 0


@pytest.mark.slow
def test_less_is_kept_and_gathered_than_in_bfloat16(rank_pool: RankPool) -> None:
    plan = fp8_plan(SCATTERED)
    plain = fp8_plan({**SCATTERED, "precision": Precision(parameters="bf16")})
    kept = [compare_plan(one, rank_pool.run).kept_bytes for one in (plan, plain)]
    assert kept[0] < kept[1]


def test_a_whole_decoder_gives_what_codes_stand_for() -> None:
    model = Decoder(replace(WIDE, layers=1)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    multiply_in_fp8(model, 8)
    layers = [one for one in model.modules() if isinstance(one, EmptyLinear)]
    assert len(layers) == 7
    for layer in layers:
        x = torch.randn(3, layer.in_features, dtype=torch.float64)
        right = rounded_to_fp8(x, 8) @ rounded_to_fp8(layer.weight, 8, square=True).T
        assert torch.allclose(layer(x), right, rtol=1e-13, atol=1e-13)
