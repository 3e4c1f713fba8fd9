"""Which class of transformers computes a model, and what is told where none does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts, ModelShape, RopeScaling
from echelon.core.plan import Plan
from echelon.proof.independent.hugging_face.configuration import (
    TransformersModel,
    transformers_model,
)
from tests.parallel.layouts import GPT2, NANO
from tests.proof.layouts import layout
from tests.training.weights.transformers_models import DEEPSEEK, MIXTRAL, QWEN3_MOE

EXPERTS = Experts(num_experts=4, top_k=2, ffn=12)
assert DEEPSEEK.experts is not None
UNSHARED = replace(DEEPSEEK.experts, shared_experts=0)
BIASES = {"qkv_bias": True, "output_bias": True}
SCALING = RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=64
)
UNEVEN = replace(NANO, hidden=NANO.hidden + 2)
"""A width that heads do not divide, which transformers' configuration of Llama refuses."""

FOUND = {
    "LlamaForCausalLM": (NANO, replace(NANO, **BIASES, mlp_bias=True)),
    "MistralForCausalLM": (replace(NANO, window=4), UNEVEN),
    "Qwen2ForCausalLM": (replace(NANO, qkv_bias=True), replace(NANO, qkv_bias=True, window=4)),
    "Qwen3ForCausalLM": (replace(NANO, qk_norm=True), replace(NANO, qk_norm=True, **BIASES)),
    "GPT2LMHeadModel": (GPT2, replace(GPT2, tied=False)),
    "MixtralForCausalLM": (MIXTRAL, replace(MIXTRAL, window=4)),
    "Qwen3MoeForCausalLM": (
        QWEN3_MOE,
        replace(QWEN3_MOE, experts=replace(EXPERTS, renormalise=False)),
    ),
    "DeepseekV3ForCausalLM": (DEEPSEEK, replace(DEEPSEEK, experts=None)),
}
NONE = (
    (replace(NANO, dropout=0.1), "its dropout draws other elements"),
    (replace(NANO, soft_cap=5.0), "no class has these factors, turns, norms, scores"),
    (replace(MIXTRAL, norm_place="both"), "no class has these factors, turns, norms, scores"),
    (replace(MIXTRAL, residual="parallel"), "no class has these factors, turns, norms, scores"),
    (replace(NANO, causal=False), "no class with these parts has attention that is not causal"),
    (replace(NANO, norm="layernorm"), "no class has rotary positions with such norms or MLPs"),
    (replace(NANO, gated=False), "no class has rotary positions with such norms or MLPs"),
    (replace(NANO, window=4, mlp_bias=True), "no class has these biases, norms of heads"),
    (replace(UNEVEN, **BIASES), "no class has these biases, norms of heads, window and widths"),
    (replace(NANO, qk_norm=True, qkv_bias=True), "no class has these biases, norms of heads"),
    (replace(GPT2, window=4), "GPT-2 is its one class with learned positions, and differs"),
    (replace(DEEPSEEK, norm_eps=1e-5), "DeepSeek-V3 norms latent vectors with 1e-06 there, not"),
    (replace(DEEPSEEK, window=4), "no class has latent attention with biases, a window"),
    (replace(DEEPSEEK, experts=UNSHARED), "its experts beside latent attention have sigmoid"),
    (replace(DEEPSEEK, experts=EXPERTS), "no class has latent attention with these experts and"),
    (
        replace(MIXTRAL, experts=replace(EXPERTS, shared_experts=1)),
        "no class without latent attention has such experts",
    ),
    (
        replace(QWEN3_MOE, window=4),
        "no class with experts has these gates, biases, norms of heads and window together",
    ),
)


def plan_with(model: ModelShape) -> Plan:
    plan = layout()
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


@pytest.mark.parametrize("name", FOUND)
def test_each_family_is_found(name: str) -> None:
    for model in FOUND[name]:
        found = transformers_model(plan_with(model))
        assert isinstance(found, TransformersModel)
        assert found.model_class == name
        assert found.config_class == f"{found.family}Config"


@pytest.mark.parametrize(("model", "reason"), NONE)
def test_a_model_of_no_class_says_what_it_lacks(model: ModelShape, reason: str) -> None:
    found = transformers_model(plan_with(model))
    assert isinstance(found, str)
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"documents": "separate"}, "it does not keep documents apart"),
        ({"balance": Balance(capacity_factor=1.0)}, "its experts have room for every token"),
        ({"balance": Balance(route="even")}, "its routers follow their scores"),
    ],
)
def test_mathematics_beside_the_model_count(changes: dict[str, object], reason: str) -> None:
    plan = plan_with(MIXTRAL)
    plan = replace(plan, mathematics=replace(plan.mathematics, **changes))
    assert transformers_model(plan) == reason


def test_groups_of_one_expert_are_not_theirs() -> None:
    assert DEEPSEEK.experts is not None
    alone = replace(DEEPSEEK.experts, groups=DEEPSEEK.experts.num_experts)
    found = transformers_model(plan_with(replace(DEEPSEEK, experts=alone)))
    assert found == "it takes the two best of each group of experts, and groups here have one"


def test_stretched_frequencies_are_said_as_transformers_says_them() -> None:
    found = transformers_model(plan_with(replace(NANO, rope_scaling=SCALING)))
    assert isinstance(found, TransformersModel)
    assert found.settings["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": NANO.rope_theta,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert found.settings["max_position_embeddings"] == max(NANO.max_positions, 65)
