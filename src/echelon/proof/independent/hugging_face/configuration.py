# SPDX-License-Identifier: Apache-2.0
"""A plan's model as a class of transformers and its settings, or why no class computes it.

Llama, Mistral, Qwen and DeepSeek differ in few parts (biases, norms of heads, a window, experts,
latent attention); the first class that has all parts of the model is taken. Models with other parts
have the class whose config.json says them, as `echelon export weights` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from echelon.core.errors import ConfigError
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.plan import Plan
from echelon.interop.hugging_face.folder import hub_config

LATENT_EPS = 1e-6
"""What transformers norms the latent vectors of DeepSeek-V3 with, whatever its settings say."""

_NO_TOKENS: dict[str, object] = {
    name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id")
}
"""Ids that a small vocabulary may lack, of which transformers warns."""


_ASKED = (
    "name layers hidden heads kv_heads head_dim ffn vocab max_positions gated activation tied norm "
    "norm_eps positions rope_theta rope_scaling qk_norm qkv_bias output_bias mlp_bias initial_std "
    "initial_spread dropout causal window latent experts lora assumed assume"
)
"""Fields of a shape that the classes below ask about, or that change no number of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel:
    """Name a family of transformers, whose classes begin so, and its settings.

    The configuration of a text model may have a name of its own, `text_family`.
    """

    family: str
    settings: dict[str, object]
    text_family: str = ""

    @property
    def model_class(self) -> str:
        """Return the class of the model."""
        return f"{self.family}LMHeadModel" if self.family == "GPT2" else f"{self.family}ForCausalLM"

    @property
    def config_class(self) -> str:
        """Return the class of its configuration."""
        return f"{self.text_family or self.family}Config"


def transformers_model(plan: Plan) -> TransformersModel | str:
    """Return the class and settings of a plan's model; where there are none, what it lacks."""
    reason = next(_beyond(plan), None)
    if reason is not None:
        return reason
    found = _plain(plan.model)
    written = _written(plan.model) if isinstance(found, str) and _is_said(plan.model) else None
    return found if written is None else written


def _is_said(model: ModelShape) -> bool:
    """Return whether a class is looked for by what leaves here."""
    experts = model.experts
    return model.latent is None and (experts is None or _is_clamped(experts))


def _is_clamped(experts: Experts) -> bool:
    """Return whether experts have anything of those of gpt-oss."""
    return experts.bias or experts.logit_bias or experts.limit is not None


def _is_new(model: ModelShape) -> bool:
    """Return whether a model has parts that the classes below do not ask about."""
    stretch = model.rope_scaling
    if stretch is not None and stretch.kind != "llama3":
        return True
    if model.gated and model.activation != "silu":
        return True
    asked = _ASKED.split()
    unasked = (field for field in fields(ModelShape) if field.name not in asked)
    return any(getattr(model, field.name) != field.default for field in unasked)


def _written(model: ModelShape) -> TransformersModel | None:
    """Return the class whose config.json says the model, as it leaves here; None for none."""
    try:
        found = hub_config(model)
    except ConfigError:
        return None
    family = found.architecture.name.removesuffix("ForCausalLM")
    settings = {k: v for k, v in found.keys.items() if k not in ("architectures", "model_type")}
    text = f"{family}Text" if found.keys["model_type"] == "gemma3_text" else ""
    return TransformersModel(family=family, text_family=text, settings={**settings, **_NO_TOKENS})


def _plain(model: ModelShape) -> TransformersModel | str:
    if _is_new(model):
        return "no class has these factors, turns, norms, scores and functions of the MLP together"
    if model.positions == "learned":
        return _gpt2(model)
    if model.norm != "rmsnorm" or not model.gated:
        return "no class has rotary positions with such norms or MLPs"
    if model.latent is not None:
        return _deepseek(model, model.latent)
    return _dense(model) if model.experts is None else _mixture(model, model.experts)


def _beyond(plan: Plan) -> Iterator[str]:
    """Yield what no class of transformers computes as the plan says."""
    model, balance = plan.model, plan.mathematics.balance
    if model.dropout:
        yield "its dropout draws other elements"
    if not model.causal:
        yield "no class with these parts has attention that is not causal"
    if plan.mathematics.documents == "separate":
        yield "it does not keep documents apart"
    if model.experts is not None and balance.capacity_factor is not None:
        yield "its experts have room for every token"
    if model.experts is not None and balance.route != "scores":
        yield "its routers follow their scores"


def _sizes(model: ModelShape) -> dict[str, object]:
    """Return the settings that all classes but GPT-2's have in common."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": model.rope_theta}
    longest = model.max_positions
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
        # It changes no number, and transformers warns of stretched models that are not longer.
        assert scaling.original_positions is not None, "a rule asks for it"
        longest = max(longest, scaling.original_positions + 1)
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": longest,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "rope_parameters": rope,
        **_NO_TOKENS,
    }


def _gpt2(model: ModelShape) -> TransformersModel | str:
    own = model.norm == "layernorm" and not model.gated and model.activation == "gelu"
    biases = model.qkv_bias and model.output_bias and model.mlp_bias
    alike = model.kv_heads == model.heads and model.query_dim == model.hidden
    plain = model.window is None and model.experts is None and not model.qk_norm
    if not (own and biases and alike and plain):
        return "GPT-2 is its one class with learned positions, and differs"
    settings: dict[str, object] = {
        "vocab_size": model.vocab,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        **_NO_TOKENS,
        "tie_word_embeddings": model.tied,
    }
    return TransformersModel(family="GPT2", settings=settings)


def _dense(model: ModelShape) -> TransformersModel | str:
    settings, window = _sizes(model), model.window
    every_bias = model.qkv_bias == model.output_bias
    slides = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    slides = {} if window is None else slides
    settings_of_biases = {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    if model.qk_norm and every_bias and not model.mlp_bias:
        own = {"attention_bias": model.qkv_bias}
        return TransformersModel(family="Qwen3", settings={**settings, **slides, **own})
    if not model.qk_norm and model.qkv_bias and not (model.output_bias or model.mlp_bias):
        return TransformersModel(family="Qwen2", settings={**settings, **slides})
    # Llama's configuration refuses a width that heads do not divide, though no part needs that.
    even = model.hidden % model.heads == 0
    if not model.qk_norm and window is None and every_bias and even:
        return TransformersModel(family="Llama", settings={**settings, **settings_of_biases})
    if not (model.qk_norm or model.qkv_bias or model.output_bias or model.mlp_bias):
        own = {"sliding_window": window}
        return TransformersModel(family="Mistral", settings={**settings, **own})
    return "no class has these biases, norms of heads, window and widths together"


def _mixture(model: ModelShape, experts: Experts) -> TransformersModel | str:
    plain = experts.router == "softmax" and not experts.router_bias and experts.groups == 1
    dense = experts.shared_experts or experts.first_dense_layers
    if not plain or dense or _is_clamped(experts) or experts.gate_scale != 1.0 or model.mlp_bias:
        return "no class without latent attention has such experts"
    settings = {**_sizes(model), "num_experts_per_tok": experts.top_k}
    if model.qk_norm and model.qkv_bias == model.output_bias and model.window is None:
        own = {
            "attention_bias": model.qkv_bias,
            "num_experts": experts.num_experts,
            "moe_intermediate_size": experts.ffn,
            "norm_topk_prob": experts.renormalise,
        }
        return TransformersModel(family="Qwen3Moe", settings={**settings, **own})
    biases = model.qkv_bias or model.output_bias
    if not model.qk_norm and not biases and experts.renormalise:
        own = {
            "intermediate_size": experts.ffn,
            "num_local_experts": experts.num_experts,
            "sliding_window": model.window,
        }
        return TransformersModel(family="Mixtral", settings={**settings, **own})
    return "no class with experts has these gates, biases, norms of heads and window together"


def _deepseek(model: ModelShape, latent: LatentAttention) -> TransformersModel | str:
    if model.norm_eps != LATENT_EPS:
        return f"DeepSeek-V3 norms latent vectors with {LATENT_EPS:g} there, not {model.norm_eps:g}"
    biases = model.qkv_bias or model.output_bias or model.mlp_bias
    if biases or model.window is not None or model.rope_scaling is not None:
        return "no class has latent attention with biases, a window or stretched frequencies"
    settings = {
        **_sizes(model),
        "head_dim": latent.rope_dim,
        "num_key_value_heads": model.heads,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "first_k_dense_replace": model.layers,
    }
    experts = model.experts
    if experts is not None and experts.router == "softmax":
        return _written(model) or "no class has latent attention with these experts and softmax"
    if experts is not None:
        if not experts.shared_experts or _is_clamped(experts) or experts.group_score == "max":
            return "its experts beside latent attention have sigmoid scores and a shared one"
        if experts.num_experts < 2 * experts.groups:
            return "it takes the two best of each group of experts, and groups here have one"
        settings |= {
            "moe_intermediate_size": experts.ffn,
            "n_routed_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "n_shared_experts": experts.shared_experts,
            "routed_scaling_factor": experts.gate_scale,
            "norm_topk_prob": experts.renormalise,
            "n_group": experts.groups,
            "topk_group": experts.top_groups,
            "first_k_dense_replace": experts.first_dense_layers,
        }
    return TransformersModel(family="DeepseekV3", settings=settings)
