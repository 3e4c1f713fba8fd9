# SPDX-License-Identifier: Apache-2.0
"""Models with experts: Mixtral, Qwen3-MoE, DeepSeek-V2 and V3, gpt-oss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from echelon.config.model.architectures.common import (
    FULL,
    HEAD_DIM,
    PLAIN_ROPE,
    SLIDING,
    Architecture,
    ConfigJsonReader,
    Keys,
    read_decoder,
    read_kinds,
    read_window,
    rope_entry,
    rope_type,
    sharpening,
    write_decoder,
    write_kinds,
)
from echelon.config.model.architectures.llama import read_qwen3, write_qwen3
from echelon.core.model_shape import ModelShape

TOP_K = "num_experts_per_tok"

LATENT_EPS = 1e-6
"""What transformers norms the latent vectors of DeepSeek-V3 with: no key of config.json sets it."""


def _read_qwen3_moe(reader: ConfigJsonReader) -> None:
    read_qwen3(reader)
    reader.only(decoder_sparse_step=(1,), mlp_only_layers=([], None))
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    reader.need("experts.", num_experts=key, top_k=TOP_K, ffn="moe_intermediate_size")
    reader.take("experts.", renormalise=("norm_topk_prob", False))


def _read_mixtral(reader: ConfigJsonReader) -> None:
    read_decoder(reader, theta=1e6)
    reader.take(head_dim=HEAD_DIM, norm_eps=("rms_norm_eps", 1e-5))
    count, ffn = "num_local_experts", "intermediate_size"
    reader.need("experts.", num_experts=count, top_k=TOP_K, ffn=ffn)
    reader.set("experts.renormalise", True, "model_type")
    reader.only(router_jitter_noise=(0.0, 0))
    read_window(reader, None)


def _read_latent(reader: ConfigJsonReader) -> None:
    """Read what DeepSeek-V2 and V3 have but for their experts."""
    read_decoder(reader)
    eps = reader.config.get("rms_norm_eps", LATENT_EPS)
    if eps != LATENT_EPS:
        why = f": its latent vectors are normed with {LATENT_EPS} whatever it says, here all alike"
        reader.refuse("rms_norm_eps", eps, LATENT_EPS, why=why)
    reader.only(attention_bias=(False,), moe_layer_freq=(1,))
    if "q_lora_rank" in reader.config and reader.config["q_lora_rank"] is None:
        reader.set("latent.query_rank", "none", "q_lora_rank")
    else:
        reader.need("latent.", query_rank="q_lora_rank")
    reader.need(
        "latent.",
        kv_rank="kv_lora_rank",
        nope_dim="qk_nope_head_dim",
        rope_dim="qk_rope_head_dim",
        value_dim="v_head_dim",
    )
    nope, rope = (reader.config.get(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if isinstance(nope, int) and isinstance(rope, int):
        reader.set("head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
        _read_sharpening(reader, nope + rope)


def _read_deepseek_v2(reader: ConfigJsonReader) -> None:
    _read_latent(reader)
    reader.only(
        mlp_bias=(False,),
        norm_topk_prob=(False, None),
        scoring_func=("softmax",),
        topk_method=("greedy", "group_limited_greedy"),
    )
    count, ffn = "n_routed_experts", "moe_intermediate_size"
    reader.need("experts.", num_experts=count, top_k=TOP_K, ffn=ffn)
    reader.take(
        "experts.",
        shared_experts=("n_shared_experts", 2),
        first_dense_layers=("first_k_dense_replace", 0),
        gate_scale=("routed_scaling_factor", 1.0),
    )
    reader.set("experts.renormalise", False, "model_type")
    if reader.config.get("topk_method") == "group_limited_greedy":
        reader.need("experts.", groups="n_group", top_groups="topk_group")
        if reader.config.get("n_group") != 1:
            reader.set("experts.group_score", "max", "topk_method")


def _read_deepseek_v3(reader: ConfigJsonReader) -> None:
    _read_latent(reader)
    reader.only(rope_interleave=(True,), scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    count, ffn = "n_routed_experts", "moe_intermediate_size"
    reader.need("experts.", num_experts=count, top_k=TOP_K, ffn=ffn)
    reader.take(
        "experts.",
        shared_experts=("n_shared_experts", 1),
        first_dense_layers=("first_k_dense_replace", 3),
        renormalise=("norm_topk_prob", True),
        gate_scale=("routed_scaling_factor", 2.5),
        groups=("n_group", 8),
        top_groups=("topk_group", 4),
    )
    reader.set("experts.router", "sigmoid", "scoring_func")
    reader.set("experts.router_bias", True, "topk_method")


def _write_qwen3_moe(shape: ModelShape) -> Keys:
    experts = shape.experts
    assert experts is not None, "only models with experts are said so"
    return {
        **write_qwen3(shape),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.renormalise,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


def _write_mixtral(shape: ModelShape) -> Keys:
    experts = shape.experts
    assert experts is not None, "only models with experts are said so"
    return {
        **write_decoder(shape),
        "head_dim": shape.head_dim,
        "intermediate_size": experts.ffn,
        "num_experts_per_tok": experts.top_k,
        "num_local_experts": experts.num_experts,
        "sliding_window": shape.window,
    }


def _read_sharpening(reader: ConfigJsonReader, head_dim: int) -> None:
    """Read what DeepSeek multiplies scores by beside the factor of cosines."""
    key, value = rope_entry(reader.config)
    table = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    factor, mscale = table.get("factor"), table.get("mscale_all_dim")
    numbers = isinstance(factor, int | float) and isinstance(mscale, int | float)
    if rope_type(table) != PLAIN_ROPE and numbers and mscale:
        sharper = sharpening(cast(float, factor), cast(float, mscale)) ** 2
        reader.set("attention_scale", head_dim**-0.5 * sharper, f"{key}.mscale_all_dim")


def _write_sharpening(shape: ModelShape, keys: Keys) -> Keys:
    """Return keys whose scores are multiplied as those of the shape."""
    table, scale, scaling = keys["rope_scaling"], shape.attention_scale, shape.rope_scaling
    if scale is None or scaling is None or scaling.factor <= 1.0:
        return keys
    sharper = (scale * shape.head_dim**0.5) ** 0.5
    mscale = round((sharper - 1.0) / (0.1 * math.log(scaling.factor)), 9)
    return {**keys, "rope_scaling": {**cast("Keys", table), "mscale_all_dim": mscale}}


def _write_latent(shape: ModelShape) -> Keys:
    """Return what DeepSeek-V2 and V3 have in common."""
    experts, latent = shape.experts, shape.latent
    assert experts is not None, "only models with experts are said so"
    assert latent is not None, "only models with latent attention are said so"
    return {
        **_write_sharpening(shape, write_decoder(shape)),
        "attention_bias": False,
        "first_k_dense_replace": experts.first_dense_layers,
        "kv_lora_rank": latent.kv_rank,
        "moe_intermediate_size": experts.ffn,
        "moe_layer_freq": 1,
        "n_group": experts.groups,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_experts,
        "norm_topk_prob": experts.renormalise,
        "num_experts_per_tok": experts.top_k,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "routed_scaling_factor": experts.gate_scale,
        "topk_group": experts.top_groups,
        "v_head_dim": latent.value_dim,
    }


def _write_deepseek_v2(shape: ModelShape) -> Keys:
    grouped = shape.experts is not None and shape.experts.groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {**_write_latent(shape), "scoring_func": "softmax", "topk_method": method}


def _write_deepseek_v3(shape: ModelShape) -> Keys:
    return {
        **_write_latent(shape),
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


GPT_OSS_WINDOW = 128  # tokens
GPT_OSS_ROPE: Keys = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""What transformers takes where a config.json of gpt-oss has none of them."""


def _read_gpt_oss(reader: ConfigJsonReader) -> None:
    key, rope = rope_entry(reader.config)
    if rope is None:
        reader = replace(reader, config={**reader.config, key: GPT_OSS_ROPE})
    read_decoder(reader, theta=150_000.0, eps=1e-5)
    biases = dict.fromkeys(("qkv_bias", "output_bias"), ("attention_bias", True))
    reader.take(kv_heads=("num_key_value_heads", 8), head_dim=("head_dim", 64), **biases)
    reader.set("sinks", True, "model_type")
    reader.only(hidden_act=("silu",))
    read_window(reader, GPT_OSS_WINDOW)
    if "model.window" in reader.entries:
        read_kinds(reader, _gpt_oss_kinds(reader), "layer_types")
    count, ffn = "num_local_experts", "intermediate_size"
    reader.need("experts.", num_experts=count, top_k=TOP_K, ffn=ffn)
    reader.take("experts.", limit=("swiglu_limit", 7.0), alpha=("swiglu_alpha", 1.702))
    for name in ("renormalise", "logit_bias", "bias"):
        reader.set(f"experts.{name}", True, "model_type")


def _gpt_oss_kinds(reader: ConfigJsonReader) -> list[str]:
    """Return the kinds of all layers: those listed, else local and global ones by turns."""
    listed, layers = reader.config.get("layer_types"), reader.config.get("num_hidden_layers")
    if isinstance(listed, list):
        return ["local" if one == SLIDING else "global" for one in cast("list[object]", listed)]
    count = layers if isinstance(layers, int) else 1
    return ["global" if layer % 2 else "local" for layer in range(count)]


def _write_gpt_oss(shape: ModelShape) -> Keys:
    experts = shape.experts
    assert experts is not None, "only models with experts are said so"
    kinds = write_kinds(shape) if shape.window else {"layer_types": [FULL] * shape.layers}
    # What is left out is no plain rope there.
    plain: Keys = {} if shape.rope_scaling else {"rope_scaling": {"rope_type": PLAIN_ROPE}}
    return {
        **write_decoder(shape),
        **plain,
        **kinds,
        "attention_bias": shape.qkv_bias,
        "head_dim": shape.head_dim,
        "intermediate_size": experts.ffn,
        "num_experts_per_tok": experts.top_k,
        "num_local_experts": experts.num_experts,
        "sliding_window": shape.window,
        "swiglu_alpha": experts.alpha,
        "swiglu_limit": experts.limit,
    }


MIXTURES = {
    "mixtral": Architecture(
        models="Mixtral",
        name="MixtralForCausalLM",
        read=_read_mixtral,
        keys=_write_mixtral,
        taken="experts in all blocks, the window",
        tensors=("model.embed_tokens.weight", "model.layers.0.block_sparse_moe.gate.weight"),
        experts=True,
    ),
    "qwen3_moe": Architecture(
        models="Qwen 3 MoE",
        name="Qwen3MoeForCausalLM",
        read=_read_qwen3_moe,
        keys=_write_qwen3_moe,
        taken="experts in all blocks, norms of heads, biases",
        experts=True,
    ),
    "deepseek_v2": Architecture(
        models="DeepSeek V2, V2-Lite",
        name="DeepseekV2ForCausalLM",
        read=_read_deepseek_v2,
        keys=_write_deepseek_v2,
        taken="latent attention, groups of experts by their best score, shared experts",
        experts=True,
        latent=True,
    ),
    "deepseek_v3": Architecture(
        models="DeepSeek V3",
        name="DeepseekV3ForCausalLM",
        read=_read_deepseek_v3,
        keys=_write_deepseek_v3,
        taken="latent attention, groups of experts, shared experts, biases of routers",
        experts=True,
        latent=True,
    ),
    "gpt_oss": Architecture(
        models="gpt-oss",
        name="GptOssForCausalLM",
        read=_read_gpt_oss,
        keys=_write_gpt_oss,
        taken="experts with biases and a clamped SwiGLU, biases of logits of routers, sinks, "
        "local and global blocks by turns, biases, yarn",
        tensors=("model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj_bias"),
        experts=True,
    ),
}
"""Each by its model_type."""
