"""Blocks of other families: the matrix is whole, and what it predicts is what ranks do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.experts import ExpertLayout
from echelon.core.plan import Plan, Precision
from echelon.launch.local.supervisor import RankPool
from echelon.proof.shrink import shrink
from tests.walks.matrix.block_cases import AGAIN, BLOCKS, BlockCase, block_cases
from tests.walks.matrix.recompute_cases import SPLITS
from tests.walks.matrix.walk import prove_case
from tests.walks.plans.bytes_walk import compare_plan

FAST = [
    BlockCase("glm4", "pp2-zb", "norm-attention"),
    BlockCase("falcon", "tp2sp", "norm-mlp"),
    BlockCase("olmo2", "tp2sp", "norm-attention"),
    BlockCase("gpt-oss", "tp2sp", "none"),
    BlockCase("neox", "ring2", "full"),
]
SLOW = [
    BlockCase(block, split, again)
    for block, split, again in (
        ("gemma", "zero3-tp2sp-pp2", "full"),
        ("granite", "tp2sp-pp2-zb", "norm-attention"),
        ("partly-turned", "ring2-tp2sp", "norm-mlp"),
        ("olmo2", "zero1-ulysses2-pp2-zb", "none"),
        ("olmo2", "zero3", "norm-attention"),
        ("olmo2", "tp2", "none"),
        ("olmo2", "zero3-tp2sp-pp2", "full"),
        ("olmo2", "tp2sp-pp2-zb", "norm-attention"),
        ("olmo2", "ring2-tp2sp", "norm-mlp"),
        ("glm4", "zero3-tp2sp-pp2", "activation"),
        ("neox", "zero3-tp2sp-pp2", "norm-mlp"),
        ("neox", "ring2-tp2sp", "full"),
        ("neox", "zero1-ulysses2-pp2-zb", "full"),
        ("falcon", "ring2", "full"),
        ("falcon", "ring2-tp2sp", "full"),
        ("falcon", "pp2", "none"),
        ("falcon", "zero1-ulysses2-pp2-zb", "full"),
        ("partly-turned", "zero1-ulysses2-pp2-zb", "full"),
        ("falcon", "tp2sp-pp2-zb", "norm-attention"),
        ("falcon", "tp2", "none"),
        ("gpt-oss-attention", "zero3-tp2sp-pp2", "norm-mlp"),
        ("gpt-oss", "zero3-tp2sp-pp2", "none"),
        ("gpt-oss", "zero3-tp2sp-pp2", "full"),
        ("gpt-oss", "zero1-ulysses2-pp2-zb", "none"),
        ("gpt-oss", "ring2-tp2sp", "norm-attention"),
        ("gpt-oss", "pp2-zb", "none"),
        ("gpt-oss-attention", "pp2-zb", "none"),
        ("deepseek-v2", "zero3-tp2sp-pp2", "none"),
        ("deepseek-v2", "tp2sp-pp2-zb", "full"),
        ("deepseek-v2-lite", "zero3-tp2sp-pp2", "none"),
        ("deepseek-v2-lite", "pp2-zb", "none"),
        ("deepseek-v2-lite", "tp2", "full"),
        ("deepseek-v2-lite", "ulysses2", "full"),
        ("deepseek-v2", "pp2", "full"),
        ("gemma3", "tp2sp", "norm-attention"),
        ("gemma3", "pp2-zb", "full"),
        ("gpt-oss-attention", "tp2sp", "norm-mlp"),
        ("gpt-oss-attention", "tp2sp-pp2-zb", "norm-attention"),
    )
]


def test_the_matrix_of_blocks_is_whole() -> None:
    every = [*block_cases()]
    met = {(case.block, case.split, case.again) for case in every}
    assert len(every) == len(met)
    for block in BLOCKS:
        # Experts and latent attention have no operators of their own that are made again.
        again = {"gpt-oss": {"none", "norm-attention", "full"}, "deepseek-v2": {"none", "full"}}
        again["deepseek-v2-lite"] = again["deepseek-v2"]
        kinds = again.get(block, set(AGAIN))
        assert {one for one in met if one[0] == block} == {
            (block, name, again) for name in SPLITS for again in kinds
        }


def test_experts_are_shared_out_and_cut_in_some_cases() -> None:
    for family in ("gpt-oss", "deepseek"):
        layouts = [case.plan().layout for case in block_cases() if case.block.startswith(family)]
        with_experts = [one for one in layouts if one.mesh.ep > 1 or one.experts.expert_tp > 1]
        met = {(one.mesh.ep, one.experts.expert_tp) for one in with_experts}
        assert met == {(2, 1), (1, 2), (2, 2)}
        assert len(with_experts) < len(layouts)


def test_plans_have_the_blocks_of_their_names_when_they_are_shrunk_too() -> None:
    for case in block_cases():
        plan = case.plan()
        assert Plan.from_json(plan.to_json()) == plan
        small, model = shrink(plan).model, plan.model
        assert small.norms == model.norms
        assert small.turned_dims < small.head_dim or model.rotary.fraction == 1.0
        assert small.turned_dims >= 2
        for field in ("multipliers", "residual", "norm_place", "activation", "norm_offset"):
            assert getattr(small, field) == getattr(model, field)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_bytes_are_those_of_the_formulas(case: BlockCase, rank_pool: RankPool) -> None:
    found = compare_plan(case.plan(), rank_pool.run)
    assert found.problems == ()
    assert not found.wrong, found.peak_error


IN_BF16 = Precision(parameters="bf16", gradients="bf16", reduction="bf16")


@pytest.mark.parametrize(
    ("case", "vocab"),
    [
        # 20,000 logits a token: a piece of 13 tokens, and one of those that are left.
        (BlockCase("partly-turned", "alone", "none"), 20_000),
        pytest.param(BlockCase("gemma3", "alone", "none"), 20_000, marks=pytest.mark.slow),
        pytest.param(BlockCase("gemma3", "tp2sp", "none"), 1000, marks=pytest.mark.slow),
        pytest.param(BlockCase("partly-turned", "tp2", "none"), 1000, marks=pytest.mark.slow),
        pytest.param(BlockCase("olmo2", "tp2sp", "norm-attention"), 49, marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_told_where_all_is_in_bf16(
    case: BlockCase, vocab: int, rank_pool: RankPool
) -> None:
    plan = case.plan()
    model = replace(plan.model, vocab=vocab)
    mathematics = replace(plan.mathematics, precision=IN_BF16, model=model)
    found = compare_plan(replace(plan, mathematics=mathematics), rank_pool.run)
    assert found.problems == ()
    assert abs(found.peak_error) <= 0.005


@pytest.mark.parametrize(
    "case",
    [
        BlockCase("deepseek-v2-lite", "ulysses2", "none"),
        pytest.param(BlockCase("deepseek-v2", "ulysses2", "full"), marks=pytest.mark.slow),
        pytest.param(
            BlockCase("deepseek-v2", "zero1-ulysses2-pp2-zb", "none"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda case: case.name,
)
def test_the_peak_of_latent_attention_is_told_where_heads_are_exchanged(
    case: BlockCase, rank_pool: RankPool
) -> None:
    plan = case.plan()
    layout = replace(plan.layout, mesh=replace(plan.mesh, ep=1), experts=ExpertLayout())
    model = replace(plan.model, experts=None)
    plan = replace(plan, layout=layout, mathematics=replace(plan.mathematics, model=model))
    found = compare_plan(plan, rank_pool.run)
    assert found.problems == ()
    assert abs(found.peak_error) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_each_kind_is_proven_and_its_bytes_are_equal(case: BlockCase, rank_pool: RankPool) -> None:
    found = compare_plan(case.plan(), rank_pool.run)
    assert found.problems == ()
    assert not found.wrong, found.peak_error
    assert prove_case(case, rank_pool.run) == ""


def test_one_case_is_proven(rank_pool: RankPool) -> None:
    assert prove_case(BlockCase("neox", "tp2", "none"), rank_pool.run) == ""
