"""Hugging Face config.json files: the same shapes as the presets, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from echelon.config.load import load_job
from echelon.core.model_shape import ModelShape, RopeScaling
from tests.config.problems import problems_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
}
LLAMA_405B = LLAMA | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MISTRAL = LLAMA | {
    "model_type": "mistral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "sliding_window": None,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
QWEN: dict[str, Any] = {"model_type": "qwen2", "use_sliding_window": True}
QWEN_SLIDES, QWEN_FULL = LLAMA | QWEN, LLAMA | {"model_type": "qwen2"}
QWEN_MOE = QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 4096}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "initializer_range": 0.006,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""What extends DeepSeek-V3 to 163,840 positions."""


def shape_of(folder: Path, config: dict[str, Any]) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    sets = [f"model.hf_config={folder}", "batch.sequence_length=64"]
    return load_job("nano", sets).plan.model


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA, "llama3-8b"),
        (LLAMA_405B, "llama3.1-405b"),
        (MISTRAL, "mistral-7b"),
        (GPT2, "gpt2"),
        (QWEN3, "qwen3-8b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (MIXTRAL, "mixtral-8x7b"),
        (DEEPSEEK, "deepseek-v3"),
    ],
)
def test_a_published_config_is_the_preset(
    tmp_path: Path, config: dict[str, Any], preset: str
) -> None:
    folder = tmp_path / preset
    folder.mkdir()
    assert shape_of(folder, config) == load_job(preset).plan.model


def test_qwen2_has_biases_in_front_and_none_behind(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True})
    assert (shape.qkv_bias, shape.output_bias, shape.qk_norm, shape.tied) == (
        True,
        False,
        False,
        True,
    )


def test_the_weights_of_experts_are_read(tmp_path: Path) -> None:
    """Qwen3-MoE does not renormalise where nothing is said, Mixtral always does."""
    silent = {key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"}
    found = [shape_of(tmp_path, config).experts for config in (silent, QWEN3_MOE, MIXTRAL)]
    assert [experts is not None and experts.renormalise for experts in found] == [
        False,
        True,
        True,
    ]
    changed = {"routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
    experts = shape_of(tmp_path, DEEPSEEK | changed).experts
    assert experts is not None
    assert (experts.gate_scale, experts.groups, experts.top_groups) == (1.5, 4, 2)
    assert not experts.renormalise


def test_what_a_deepseek_config_leaves_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    left_out = (
        "n_shared_experts",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    )
    short = {key: value for key, value in DEEPSEEK.items() if key not in left_out}
    assert shape_of(tmp_path, short) == shape_of(tmp_path, DEEPSEEK)


def test_what_the_architecture_implies_need_not_be_written(tmp_path: Path) -> None:
    bare = {k: LLAMA[k] for k in list(LLAMA)[:5]}
    bare |= {"vocab_size": 300, "max_position_embeddings": 64}
    shape = shape_of(tmp_path, bare)
    assert (shape.kv_heads, shape.head_dim) == (32, 128)
    assert (shape.rope_theta, shape.norm_eps, shape.tied) == (10_000.0, 1e-6, False)


def test_rope_parameters_of_newer_files_are_read(tmp_path: Path) -> None:
    scaling = LLAMA_405B["rope_scaling"] | {"rope_theta": 500000.0}
    config = {k: v for k, v in LLAMA_405B.items() if k not in ("rope_scaling", "rope_theta")}
    newer = shape_of(tmp_path, config | {"rope_parameters": scaling})
    assert newer == shape_of(tmp_path, LLAMA_405B)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 2048}, 2048),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "qwen2", "sliding_window": 2048, "use_sliding_window": False}, None),
        (QWEN | {"sliding_window": 2048, "max_window_layers": 0}, 2048),
        (QWEN | {"max_window_layers": 0}, 4096),
        (QWEN | {"sliding_window": None, "max_window_layers": 0}, None),
        (QWEN | {"sliding_window": 2048, "layer_types": ["sliding_attention"] * 32}, 2048),
        (QWEN | {"sliding_window": 2048, "layer_types": ["full_attention"] * 32}, None),
        (QWEN | {"sliding_window": 2048, "max_window_layers": 32}, None),
        (MIXTRAL | {"sliding_window": 2048}, 2048),
        (QWEN_MOE | {"max_window_layers": 0}, 4096),
    ],
)
def test_a_sliding_window_of_every_layer_is_the_window(
    tmp_path: Path, change: dict[str, Any], window: int | None
) -> None:
    config = LLAMA | change
    shape = shape_of(tmp_path, config)
    assert shape.max_positions == config["max_position_embeddings"]
    assert shape.window == window


@pytest.mark.parametrize(
    ("change", "positions"),
    [
        (QWEN_MOE | {"max_window_layers": 48}, 4096),
    ],
)
def test_a_sliding_window_of_some_layers_is_the_longest_sequence(
    tmp_path: Path, change: dict[str, Any], positions: int
) -> None:
    shape = shape_of(tmp_path, LLAMA | change)
    assert (shape.max_positions, shape.window) == (positions, None)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (QWEN, ("global",) * 28 + ("local",) * 4),
        (QWEN | {"max_window_layers": 31}, ("global",) * 31 + ("local",)),
        (QWEN | {"max_window_layers": 0}, ()),
        (QWEN | {"layer_types": ["full_attention", "sliding_attention"] * 16}, ("global", "local")),
    ],
)
def test_a_sliding_window_of_some_layers_is_that_of_local_blocks(
    tmp_path: Path, change: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    shape = shape_of(tmp_path, LLAMA | change | {"sliding_window": 2048})
    assert (shape.window, shape.layer_kinds) == (2048, kinds)


def test_the_extension_of_deepseek_is_read_whole(tmp_path: Path) -> None:
    """Its cosines are as they are, for both sharpenings are one; scores have its square."""
    shape = shape_of(tmp_path, DEEPSEEK | {"rope_scaling": YARN, "max_position_embeddings": 163840})
    assert shape.rope_scaling == RopeScaling(
        kind="yarn", factor=40, original_positions=4096, attention_factor=1.0
    )
    sharper = (0.1 * math.log(40) + 1.0) ** 2
    assert shape.attention_scale == pytest.approx(192**-0.5 * sharper, rel=1e-12)
    assert shape_of(tmp_path, DEEPSEEK).rope_scaling is None


@pytest.mark.parametrize("config", [LLAMA, QWEN_FULL, GPT2], ids=lambda c: c["model_type"])
def test_a_query_may_meet_the_keys_behind_it(tmp_path: Path, config: dict[str, Any]) -> None:
    assert shape_of(tmp_path, config).causal
    assert shape_of(tmp_path, config | {"is_causal": True}).causal
    assert not shape_of(tmp_path, config | {"is_causal": False}).causal


def test_scores_that_are_said_to_be_plain_are_read(tmp_path: Path) -> None:
    said = {"layer_types": ["full_attention"] * 32, "attn_logit_softcapping": None}
    assert shape_of(tmp_path, LLAMA | said) == shape_of(tmp_path, LLAMA)


def test_a_field_of_ones_own_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = tmp_path / "run.toml"
    run.write_text('extends = "nano"\n[model]\nhf_config = "config.json"\nlayers = 2\n')
    job = load_job(run)
    assert (job.plan.model.layers, job.plan.model.hidden) == (2, 4096)
    assert job.plan.model.name == f"{tmp_path.name}-changed"
    hidden = next(row for row in job.sources if row.key == "model.hidden")
    assert hidden.source == f"{tmp_path / 'config.json'}: hidden_size"


@pytest.mark.parametrize(
    ("config", "rule", "says"),
    [
        ({"model_type": "bloom"}, "hf-config-model-type", '"bloom"'),
        ({"hidden_size": 3}, "hf-config-model-type", "no model_type"),
        ([1], "hf-config-unreadable", "not a JSON object"),
        ({"model_type": "llama"}, "hf-config-missing-key", "num_hidden_layers"),
        (LLAMA | {"hidden_act": "relu"}, "hf-config-value", "relu"),
        (LLAMA | {"rope_scaling": {"type": "proportional"}}, "hf-config-value", "proportional"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "hf-config-missing-key", "factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "hf-config-missing-key", "factor"),
        (LLAMA | {"rope_scaling": 8}, "hf-config-value", "rope_scaling"),
        (LLAMA | {"hidden_size": -1}, "out-of-range", "model.hidden = -1"),
        (LLAMA | {"hidden_size": "4096"}, "wrong-type", "model.hidden"),
        (MISTRAL | {"sliding_window": "all"}, "wrong-type", "model.window"),
        (GPT2 | {"activation_function": "gelu"}, "hf-config-value", "gelu"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "hf-config-value", "inverse"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "hf-config-value", "mlp_only_layers"),
        (QWEN_SLIDES | {"layer_types": ["chunked_attention"] * 32}, "hf-config-value", "chunked"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "hf-config-value", "sliding"),
        (QWEN_FULL | {"use_sliding_window": "false"}, "hf-config-value", '"false"'),
        (QWEN_FULL | {"use_sliding_window": 1}, "hf-config-value", "use_sliding_window = 1"),
        (LLAMA | {"attn_logit_softcapping": 50.0}, "hf-config-value", "50.0"),
        (GPT2 | {"final_logit_softcapping": 30.0}, "hf-config-value", "30.0"),
        (LLAMA | {"is_causal": "no"}, "wrong-type", "model.causal"),
        (MISTRAL | {"is_causal": False, "sliding_window": 8}, "hf-config-value", "is_causal"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "hf-config-value", "router_jitter_noise"),
        (DEEPSEEK | {"rope_interleave": False}, "hf-config-value", "rope_interleave"),
        (DEEPSEEK | {"n_group": 7}, "groups-divide-experts", "num_experts = 256"),
        (DEEPSEEK | {"num_key_value_heads": 8}, "latent-heads-have-keys", "heads = 128"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "hf-config-value", "softmax"),
        (DEEPSEEK | {"rms_norm_eps": 1e-5}, "hf-config-value", "normed with 1e-06 whatever"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(
    tmp_path: Path, config: Any, rule: str, says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = problems_of("nano", [f"model.hf_config={tmp_path}"])
    assert list(found) == [rule]
    assert says in found[rule].message
    assert str(tmp_path) in found[rule].set_by


def test_a_file_that_is_not_json_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert list(problems_of("nano", [f"model.hf_config={path}"])) == ["no-such-file"]
    path.write_text("{")
    assert list(problems_of("nano", [f"model.hf_config={path}"])) == ["hf-config-unreadable"]
    path.write_bytes(b"\xff\xfe")
    assert list(problems_of("nano", [f"model.hf_config={path}"])) == ["hf-config-unreadable"]
