"""Small configurations of transformers, one or several for each family that is read."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

WIDE_HEADS = {**SIZES, "head_dim": 6}

_FALCON = {
    **{key: value for key, value in SIZES.items() if "key_value" not in key},
    "ffn_hidden_size": 24,
}

LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {**WIDE_HEADS, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma with biases": (
        "gemma",
        {**WIDE_HEADS, "attention_bias": True, "num_key_value_heads": 1},
    ),
    "granite": (
        "granite",
        {
            **SIZES,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite with biases": (
        "granite",
        {**SIZES, "attention_bias": True, "mlp_bias": True, "logits_scaling": 3.0},
    ),
    "smollm3": ("smollm3", {**SIZES, "no_rope_layer_interval": 4}),
    "smollm3, every second": (
        "smollm3",
        {**SIZES, "no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": False},
    ),
    "phi3": ("phi3", {**SIZES, "hidden_size": 32, "partial_rotary_factor": 0.75}),
    "phi3 with a window": ("phi3", {**SIZES, "sliding_window": 3}),
    "starcoder2": ("starcoder2", {**SIZES, "sliding_window": 5}),
    "starcoder2 without biases": (
        "starcoder2",
        {**SIZES, "use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False},
    ),
    "phi3, longrope": (
        "phi3",
        {
            **SIZES,
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1],
                "long_factor": [1.5, 4.0],
            },
        },
    ),
    "phi3, short of longrope": (
        "phi3",
        {
            **SIZES,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1],
                "long_factor": [1.5, 4.0],
            },
        },
    ),
    "llama, linear": (
        "llama",
        {
            **SIZES,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
        },
    ),
    "llama, dynamic": (
        "llama",
        {
            **SIZES,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
        },
    ),
    "qwen2, full layers before local ones, yarn": (
        "qwen2",
        {
            **SIZES,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "qwen3, local layers by turns": (
        "qwen3",
        {
            **SIZES,
            "head_dim": 6,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma2": (
        "gemma2",
        {**WIDE_HEADS, "sliding_window": 3, "query_pre_attn_scalar": 9, "head_dim": 6},
    ),
    "gemma2, tight caps": (
        "gemma2",
        {
            **WIDE_HEADS,
            "sliding_window": 5,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.7,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **WIDE_HEADS,
            "num_hidden_layers": 7,
            "sliding_window": 3,
            "query_pre_attn_scalar": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": 12,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "deepseek_v2, greedy": ("deepseek_v2", {**LATENT, "q_lora_rank": 9}),
    "deepseek_v2 lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "gpt_oss": (
        "gpt_oss",
        {
            **WIDE_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 3,
            "swiglu_limit": 0.4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "gpt_oss, as transformers has it": (
        "gpt_oss",
        {**WIDE_HEADS, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5},
    ),
    "gpt_oss, global alone, no biases of attention": (
        "gpt_oss",
        {
            **WIDE_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "glm": ("glm", {**SIZES, "head_dim": 12}),
    "glm, all turns": ("glm", {**SIZES, "head_dim": 4, "partial_rotary_factor": 1.0}),
    "olmo2": ("olmo2", {**SIZES}),
    "olmo2 with biases": ("olmo2", {**SIZES, "attention_bias": True, "tie_word_embeddings": True}),
    "glm4": ("glm4", {**SIZES, "head_dim": 8}),
    "glm4 without biases": ("glm4", {**SIZES, "head_dim": 4, "attention_bias": False}),
    "gpt_neox": ("gpt_neox", {**SIZES, "hidden_size": 32}),
    "gpt_neox, in turn": (
        "gpt_neox",
        {**SIZES, "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False},
    ),
    "falcon 7b": ("falcon", {**_FALCON, "multi_query": True}),
    "falcon 40b": (
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon, in turn": (
        "falcon",
        {**_FALCON, "parallel_attn": False, "multi_query": False, "tie_word_embeddings": False},
    ),
    "falcon 11b": (
        "falcon",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
        },
    ),
}
"""The model_type of each, and its settings."""
