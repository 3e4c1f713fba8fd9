"""Small mixtures of experts of transformers with random weights, and their shapes here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from tests.parallel.layouts import NANO

Tensors = dict[str, torch.Tensor]

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

MIXTRAL = replace(NANO, name="mixtral", layers=2, experts=Experts(num_experts=4, top_k=2, ffn=12))

QWEN3_MOE = replace(MIXTRAL, name="qwen3-moe", qk_norm=True, norm_eps=1e-6)

DEEPSEEK = replace(
    NANO,
    name="deepseek-v3",
    layers=3,
    hidden=32,
    kv_heads=4,
    head_dim=10,
    norm_eps=1e-6,
    latent=LatentAttention(query_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=7),
    experts=Experts(
        num_experts=8,
        top_k=2,
        ffn=12,
        shared_experts=2,
        first_dense_layers=1,
        router="sigmoid",
        router_bias=True,
        gate_scale=2.5,
        groups=2,
        top_groups=1,
    ),
)

GPT_OSS = replace(
    NANO,
    name="gpt-oss",
    layers=2,
    sinks=True,
    window=4,
    layer_kinds=("local", "global"),
    qkv_bias=True,
    output_bias=True,
    experts=Experts(
        num_experts=4, top_k=2, ffn=12, logit_bias=True, bias=True, limit=1.5, alpha=1.3
    ),
)

DENSE_DEEPSEEK = replace(DEEPSEEK, name="dense-deepseek", experts=None)
"""Every block has a dense MLP: what is left is latent attention."""

SHAPES = {shape.name: shape for shape in (MIXTRAL, QWEN3_MOE, DEEPSEEK)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """A model of transformers, and its weights as it holds them: experts in two tensors."""

    model: Any
    tensors: Tensors

    def save(self, folder: Path, *, fused: bool) -> Path:
        """Write its weights: as it holds them, or as it saves them: a tensor per matrix."""
        if fused:
            held = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
            save_file(held, folder / "model.safetensors")
        else:
            self.model.save_pretrained(folder)
        return folder


def original(shape: ModelShape) -> Original:
    """Return the model of transformers that has this shape."""
    make = {"mixtral": _mixtral, "qwen3-moe": _qwen3_moe}.get(shape.name, _deepseek)
    model = make(shape).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            drawn = torch.randn(tensor.shape, generator=generator) * 0.3
            tensor.copy_(drawn + (tensor.dim() == 1))
    return Original(model=model, tensors=model.state_dict())


def _settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "num_experts_per_tok": 2,
        **_ROPE,
    }


def _mixtral(shape: ModelShape) -> Any:
    assert shape.experts is not None
    settings = {**_settings(shape), "intermediate_size": shape.experts.ffn}
    count = shape.experts.num_experts
    return MixtralForCausalLM(MixtralConfig(**settings, num_local_experts=count))


def _qwen3_moe(shape: ModelShape) -> Any:
    assert shape.experts is not None
    settings = _settings(shape)
    settings |= {"num_experts": shape.experts.num_experts, "norm_topk_prob": True}
    settings |= {"moe_intermediate_size": shape.experts.ffn}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))


def _deepseek(shape: ModelShape) -> Any:
    latent, experts = shape.latent, shape.experts or DEEPSEEK.experts
    assert latent is not None
    assert experts is not None
    settings: dict[str, Any] = _settings(shape)
    settings |= {
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "moe_intermediate_size": experts.ffn,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_experts,
        "routed_scaling_factor": experts.gate_scale,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "first_k_dense_replace": shape.layers
        if shape.experts is None
        else experts.first_dense_layers,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**settings))
