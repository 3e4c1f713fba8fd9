"""The table of weights is that of the documentation: names, sizes, first values, groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.proof.independent.weights import first_values, has_experts, weights_of
from tests.parallel.layouts import NANO
from tests.training.weights.transformers_models import DEEPSEEK, QWEN3_MOE

GPT = replace(
    NANO,
    norm="layernorm",
    positions="learned",
    gated=False,
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied=True,
)


assert DEEPSEEK.latent is not None
LITE = replace(DEEPSEEK, name="lite", latent=replace(DEEPSEEK.latent, query_rank=None))


@pytest.mark.parametrize(
    "model", [NANO, GPT, QWEN3_MOE, DEEPSEEK, LITE], ids=lambda model: model.name
)
def test_two_tables_of_weights_agree(model: ModelShape) -> None:
    ours = {spec.name: spec.shape for spec in parameters(model)}
    facts = weights_of(model)
    assert list(facts) == list(ours)
    assert {name: fact.shape for name, fact in facts.items()} == ours


def test_first_values_have_the_documented_spread() -> None:
    wide = replace(NANO, hidden=64, ffn=256, initial_std=0.1)
    values = first_values(wide, 3)
    assert float(values["embedding.weight"].std()) == pytest.approx(0.1, rel=0.05)
    narrow = 0.1 / (2 * wide.layers) ** 0.5
    assert float(values["layers.0.mlp.down.weight"].std()) == pytest.approx(narrow, rel=0.05)
    assert values["norm.weight"].tolist() == [1.0] * 64
    assert not values["norm.weight"].equal(first_values(wide, 3)["embedding.weight"][0])
    assert set(first_values(GPT, 0)["layers.0.attention.q.bias"].tolist()) == {0.0}


def test_the_first_blocks_are_dense() -> None:
    assert [has_experts(DEEPSEEK, block) for block in range(3)] == [False, True, True]
    assert not has_experts(NANO, 0)
    facts = weights_of(DEEPSEEK)
    assert facts["layers.1.mlp.router.weight"].is_matrix
    assert not facts["layers.1.mlp_norm.weight"].is_matrix
    assert not facts["embedding.weight"].in_block
