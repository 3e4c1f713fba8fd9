"""Models with experts leave in their own keys, and are the same read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.model.architectures.mixtures import MIXTURES
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.interop.hugging_face.folder import hub_config, shape_of_config
from tests.config.model.architectures.beside import (
    names_of,
    require_its_files,
    require_the_same_numbers,
)
from tests.training.weights.transformers_models import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN3_MOE


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("mixtral", MIXTRAL),
        ("qwen3_moe", QWEN3_MOE),
        ("deepseek_v3", DEEPSEEK),
        ("gpt_oss", GPT_OSS),
    ],
)
def test_the_same_shape_is_read_back(kind: str, shape: ModelShape) -> None:
    assert kind in MIXTURES
    found = hub_config(shape, kind)
    back = shape_of_config(found.keys, shape.name)
    assert back is not None
    if not shape.has_dense_blocks:
        back = replace(back, ffn=shape.ffn)
    assert back == shape


@pytest.mark.parametrize("name", names_of("gpt_oss", "deepseek_v2"))
def test_the_same_numbers_as_transformers(name: str, tmp_path: Path) -> None:
    require_the_same_numbers(name, tmp_path)


@pytest.mark.parametrize("name", names_of("gpt_oss", "deepseek_v2"))
def test_files_of_transformers(name: str, tmp_path: Path) -> None:
    require_its_files(name, tmp_path)


def test_gpt_oss_as_released_and_with_most_left_out() -> None:
    sizes = {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "max_position_embeddings": 131_072,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    }
    released = {
        **sizes,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
    }
    shape = shape_of_config(released, "gpt-oss-20b")
    assert shape is not None
    assert shape == shape_of_config(sizes, "gpt-oss-20b")
    # The model card says 20.9B in all, and 3.61B active with the head, but without the embedding.
    assert round(num_parameters(shape) / 1e9, 2) == 20.91
    active = num_active_parameters(shape) - shape.vocab * shape.hidden
    assert round(active / 1e9, 2) == 3.61
    assert shape.experts is not None
    assert (shape.experts.limit, shape.experts.alpha) == (7.0, 1.702)
    assert shape.layer_kinds == ("local", "global")


def test_another_function_of_gpt_oss_is_refused() -> None:
    keys = {**hub_config(GPT_OSS).keys, "hidden_act": "gelu"}
    assert shape_of_config(keys, "gpt-oss") is None


def test_deepseek_v2_lite_as_released() -> None:
    released = {
        "model_type": "deepseek_v2",
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 163_840,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    }
    shape = shape_of_config(released, "lite")
    assert shape is not None
    # DeepSeek-V2, 2024, appendix B: 15.7B in all, 2.4B for each token, embedding and head apart.
    assert round(num_parameters(shape) / 1e9, 1) == 15.7
    apart = 2 * shape.vocab * shape.hidden
    assert round((num_active_parameters(shape) - apart) / 1e9, 1) in (2.2, 2.3, 2.4)
    assert shape_of_config({**released, "norm_topk_prob": True}, "lite") is None


def test_a_model_that_compresses_queries_says_how() -> None:
    keys = dict(hub_config(DEEPSEEK).keys)
    assert shape_of_config({**keys, "q_lora_rank": None}, "v3") is not None
    del keys["q_lora_rank"]
    assert shape_of_config(keys, "v3") is None
