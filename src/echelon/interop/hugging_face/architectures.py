"""A shape in the keys of each model_type of transformers.

What a model_type has no key for is not looked at here: `config_json.py` reads the keys back, and
takes a model_type only where the same shape comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from echelon.core.model_shape import ModelShape

Keys: TypeAlias = dict[str, object]


def _decoder(shape: ModelShape) -> Keys:
    keys: Keys = {
        "hidden_act": shape.activation,
        "hidden_size": shape.hidden,
        "initializer_range": shape.initial_std,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
    }
    if shape.rope_scaling is not None:
        keys["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_frequency_factor,
            "high_freq_factor": shape.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_positions,
        }
    if not shape.causal:
        keys["is_causal"] = False
    return keys


def _llama(shape: ModelShape) -> Keys:
    return {
        **_decoder(shape),
        "attention_bias": shape.qkv_bias,
        "head_dim": shape.head_dim,
        "mlp_bias": shape.mlp_bias,
    }


def _mistral(shape: ModelShape) -> Keys:
    return {**_decoder(shape), "head_dim": shape.head_dim, "sliding_window": shape.window}


def _qwen_window(shape: ModelShape) -> Keys:
    if shape.window is None:
        return {"use_sliding_window": False}
    return {
        "layer_types": ["sliding_attention"] * shape.layers,
        "max_window_layers": 0,
        "sliding_window": shape.window,
        "use_sliding_window": True,
    }


def _qwen2(shape: ModelShape) -> Keys:
    return {**_decoder(shape), **_qwen_window(shape)}


def _qwen3(shape: ModelShape) -> Keys:
    return {
        **_decoder(shape),
        **_qwen_window(shape),
        "attention_bias": shape.qkv_bias,
        "head_dim": shape.head_dim,
    }


def _qwen3_moe(shape: ModelShape) -> Keys:
    experts = shape.experts
    assert experts is not None, "only models with experts are said so"
    return {
        **_qwen3(shape),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.renormalise,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


def _mixtral(shape: ModelShape) -> Keys:
    experts = shape.experts
    assert experts is not None, "only models with experts are said so"
    return {
        **_decoder(shape),
        "head_dim": shape.head_dim,
        "intermediate_size": experts.ffn,
        "num_experts_per_tok": experts.top_k,
        "num_local_experts": experts.num_experts,
        "sliding_window": shape.window,
    }


def _deepseek_v3(shape: ModelShape) -> Keys:
    experts, latent = shape.experts, shape.latent
    assert experts is not None, "only models with experts are said so"
    assert latent is not None, "only models with latent attention are said so"
    return {
        **_decoder(shape),
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
        "rope_interleave": True,
        "routed_scaling_factor": experts.gate_scale,
        "scoring_func": "sigmoid",
        "topk_group": experts.top_groups,
        "topk_method": "noaux_tc",
        "v_head_dim": latent.value_dim,
    }


def _gpt2(shape: ModelShape) -> Keys:
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": shape.dropout,
        "initializer_range": shape.initial_std,
        "layer_norm_epsilon": shape.norm_eps,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_layer": shape.layers,
        "n_positions": shape.max_positions,
        "resid_pdrop": shape.dropout,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class HubArchitecture:
    """Say how a model_type is called, and how it says a shape.

    `tensor` is one of its tensors, by which `weight_names` knows its names; `experts` and `latent`
    are whether its models have them. `whole_heads`: transformers wants the width of the residual
    stream to be a multiple of the heads, though they may have any width.
    """

    name: str
    keys: Callable[[ModelShape], Keys]
    tensor: str = "model.embed_tokens.weight"
    experts: bool = False
    latent: bool = False
    whole_heads: bool = False

    def why_not(self, shape: ModelShape) -> str:
        """Return what transformers would refuse; "" where it reads the shape."""
        if self.whole_heads and shape.hidden % shape.heads:
            return (
                f"model.hidden = {shape.hidden} is no multiple of model.heads = {shape.heads} "
                f"({shape.hidden} % {shape.heads} = {shape.hidden % shape.heads}), which "
                f"{self.name} wants"
            )
        return ""


HUB_ARCHITECTURES: Mapping[str, HubArchitecture] = {
    "llama": HubArchitecture(name="LlamaForCausalLM", keys=_llama, whole_heads=True),
    "mistral": HubArchitecture(name="MistralForCausalLM", keys=_mistral),
    "qwen2": HubArchitecture(name="Qwen2ForCausalLM", keys=_qwen2),
    "qwen3": HubArchitecture(name="Qwen3ForCausalLM", keys=_qwen3),
    "mixtral": HubArchitecture(
        name="MixtralForCausalLM",
        keys=_mixtral,
        tensor="model.layers.0.block_sparse_moe.gate.weight",
        experts=True,
    ),
    "qwen3_moe": HubArchitecture(name="Qwen3MoeForCausalLM", keys=_qwen3_moe, experts=True),
    "deepseek_v3": HubArchitecture(
        name="DeepseekV3ForCausalLM", keys=_deepseek_v3, experts=True, latent=True
    ),
    "gpt2": HubArchitecture(name="GPT2LMHeadModel", keys=_gpt2, tensor="transformer.wte.weight"),
}
"""Each model_type, the plainest first: the first that says a shape is taken."""
