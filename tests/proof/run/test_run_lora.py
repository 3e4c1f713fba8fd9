"""Plans whose adapters alone are trained are proven, and what ranks keep is what `cost/` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.choices.lora import LATENT_LINEARS, LINEARS, LORA_LINEARS, Lora
from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import OUR_ENGINE, prove
from tests.walks.matrix.block_cases import BlockCase
from tests.walks.plans.bytes_walk import compare_plan

FAST = (BlockCase("partly-turned", "tp2sp", "none"), ("q", "v"))
SLOW: tuple[tuple[BlockCase, tuple[str, ...]], ...] = (
    (BlockCase("partly-turned", "zero3-tp2sp-pp2", "none"), LINEARS),
    (BlockCase("partly-turned", "pp2", "norm-mlp"), ("q", "v")),
    (BlockCase("gemma3", "zero3", "none"), ("k", "o", "up")),
    (BlockCase("partly-turned", "ring2", "none"), LINEARS),
    (BlockCase("granite", "ulysses2", "full"), ("q", "o", "down")),
    (BlockCase("gpt-oss-attention", "tp2sp", "norm-attention"), LINEARS),
    (BlockCase("falcon", "pp2-zb", "none"), ("q", "v")),
    (BlockCase("falcon", "tp2", "none"), ("up", "down")),
    (BlockCase("neox", "pp2-zb", "none"), ("down",)),
    (BlockCase("olmo2", "pp2-zb", "none"), ("down",)),
    (BlockCase("neox", "pp2-zb", "none"), ("o",)),
    (BlockCase("neox", "pp2-zb", "full"), ("q",)),
    (BlockCase("neox", "pp2-zb", "full"), ("o",)),
    (BlockCase("falcon", "pp2-zb", "full"), ("o",)),
    (BlockCase("neox", "ulysses2", "none"), ("q", "k", "v")),
    (BlockCase("neox", "ulysses2", "full"), ("k",)),
    (BlockCase("neox", "zero1-ulysses2-pp2-zb", "none"), ("k",)),
)

LATENT = (*LATENT_LINEARS, "o")
OF_LATENT: tuple[tuple[BlockCase, tuple[str, ...]], ...] = (
    (BlockCase("deepseek-v2", "alone", "none"), LORA_LINEARS),
    (BlockCase("deepseek-v2", "tp2", "none"), LORA_LINEARS),
    (BlockCase("deepseek-v2", "tp2sp", "none"), ("q_down", "kv_up")),
    (BlockCase("deepseek-v2", "pp2-zb", "none"), ("q_up",)),
    (BlockCase("deepseek-v2", "pp2-zb", "full"), ("o",)),
    (BlockCase("deepseek-v2", "pp2-zb", "full"), ("kv_up",)),
    (BlockCase("deepseek-v2", "pp2-zb", "full"), ("gate", "up", "down")),
    (BlockCase("deepseek-v2", "zero3-tp2sp-pp2", "none"), LORA_LINEARS),
    (BlockCase("deepseek-v2-lite", "tp2sp", "none"), ("q_up", "o")),
    (BlockCase("deepseek-v2-lite", "pp2-zb", "none"), ("kv_down",)),
    (BlockCase("deepseek-v2-lite", "pp2-zb", "none"), ("q_up",)),
    (BlockCase("deepseek-v2-lite", "pp2-zb", "none"), ("q_up", "kv_down")),
    (BlockCase("deepseek-v2", "ring2", "none"), ("o",)),
    (BlockCase("deepseek-v2", "ulysses2", "none"), ("kv_up",)),
)
"""Latent attention before dense MLPs."""
OF_EXPERTS: tuple[tuple[BlockCase, tuple[str, ...]], ...] = (
    (BlockCase("deepseek-v2", "alone", "none"), LATENT),
    (BlockCase("deepseek-v2", "tp2", "none"), LATENT),
    (BlockCase("deepseek-v2", "zero3-tp2sp-pp2", "none"), ("q_up", "kv_up")),
    (BlockCase("gpt-oss", "tp2", "none"), ("q", "v")),
    (BlockCase("gpt-oss", "pp2-zb", "none"), ("q", "k", "v", "o")),
    (BlockCase("gpt-oss", "zero3", "full"), ("q", "v")),
)
"""Attention before frozen experts."""


def _plan(case: BlockCase, targets: tuple[str, ...]) -> Plan:
    """Return the plan of a case with adapters on those of `targets` that it has."""
    plan = case.plan()
    own = tuple(name for name in targets if name != "gate" or plan.model.gated)
    if plan.model.latent is not None:
        own = tuple(name for name in own if name not in ("q", "k", "v"))
    model = replace(plan.model, lora=Lora(rank=4, alpha=8.0, targets=own))
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def _without_experts(plan: Plan) -> Plan:
    layout = replace(plan.layout, mesh=replace(plan.mesh, ep=1), experts=ExpertLayout())
    model = replace(plan.model, experts=None)
    return replace(plan, layout=layout, mathematics=replace(plan.mathematics, model=model))


def _check(case: BlockCase, targets: tuple[str, ...], rank_pool: RankPool) -> None:
    _check_plan(_plan(case, targets), rank_pool)


def _check_plan(plan: Plan, rank_pool: RankPool) -> None:
    prove(plan, run_ranks=rank_pool.run, subject=OUR_ENGINE, own_precision=False).require()
    found = compare_plan(plan, rank_pool.run)
    assert found.problems == ()
    assert not found.wrong, found.peak_error


def test_adapters_on_two_tensor_ranks_are_proven(rank_pool: RankPool) -> None:
    _check(*FAST, rank_pool)


def test_bytes_are_told_where_a_block_is_made_again_and_its_last_layer_waits_for_nothing(
    rank_pool: RankPool,
) -> None:
    found = compare_plan(_plan(BlockCase("gemma", "pp2-zb", "full"), ("q", "v")), rank_pool.run)
    assert found.problems == ()
    assert not found.wrong, found.peak_error


@pytest.mark.slow
@pytest.mark.parametrize(("case", "targets"), SLOW, ids=lambda one: getattr(one, "name", None))
def test_adapters_are_proven_in_every_kind_of_layout(
    case: BlockCase, targets: tuple[str, ...], rank_pool: RankPool
) -> None:
    _check(case, targets, rank_pool)


def test_adapters_of_latent_attention_on_two_tensor_ranks_are_proven(rank_pool: RankPool) -> None:
    _check(BlockCase("deepseek-v2", "tp2sp", "none"), LATENT, rank_pool)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "targets"), OF_LATENT, ids=lambda one: getattr(one, "name", None))
def test_adapters_of_latent_attention_are_proven(
    case: BlockCase, targets: tuple[str, ...], rank_pool: RankPool
) -> None:
    _check_plan(_without_experts(_plan(case, targets)), rank_pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "targets"), OF_EXPERTS, ids=lambda one: getattr(one, "name", None)
)
def test_adapters_of_attention_before_frozen_experts_are_proven(
    case: BlockCase, targets: tuple[str, ...], rank_pool: RankPool
) -> None:
    _check(case, targets, rank_pool)
