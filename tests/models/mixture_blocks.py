"""Blocks of experts of transformers with random weights, and the shapes that ours have then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from echelon.core.model_shape import Experts, ModelShape
from echelon.models.moe import MixtureOfExperts
from tests.parallel.layouts import NANO

Tensors = dict[str, torch.Tensor]

SOFTMAX = Experts(num_experts=8, top_k=2, ffn=20)
SIGMOID = Experts(num_experts=16, top_k=3, ffn=12, shared_experts=2, router="sigmoid")
GROUPED = replace(SIGMOID, router_bias=True, gate_scale=2.5, groups=4, top_groups=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Name a kind of block of transformers and the experts that it has."""

    name: str
    module: ModuleType
    experts: Experts

    @property
    def shape(self) -> ModelShape:
        """Return the shape of a model with one such block."""
        return replace(NANO, name=self.name, layers=1, hidden=32, experts=self.experts)


def _families() -> tuple[Family, ...]:
    qwen, deepseek = modeling_qwen3_moe, modeling_deepseek_v3
    raw, wide = replace(SOFTMAX, renormalise=False), replace(SOFTMAX, num_experts=32, top_k=4)
    ungrouped = replace(SIGMOID, renormalise=False, gate_scale=1.5)
    return (
        Family(name="mixtral", module=modeling_mixtral, experts=SOFTMAX),
        Family(name="qwen3-moe", module=qwen, experts=wide),
        Family(name="qwen3-moe, gates as they are", module=qwen, experts=raw),
        Family(name="deepseek-v3", module=deepseek, experts=GROUPED),
        Family(name="deepseek-v3, gates as they are", module=deepseek, experts=ungrouped),
    )


FAMILIES = _families()


def theirs(family: Family, dtype: torch.dtype, implementation: str) -> nn.Module:
    """Return the block of transformers with random weights (and biases of the choice)."""
    shape, experts = family.shape, family.experts
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_experts_per_tok": experts.top_k,
        "experts_implementation": implementation,
    }
    make = {
        modeling_mixtral: _mixtral,
        modeling_qwen3_moe: _qwen3_moe,
        modeling_deepseek_v3: _deepseek_v3,
    }[family.module]
    block = make(settings, experts)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(drawn * (0.3 if tensor.dim() > 1 else 0.1))
    if not experts.router_bias and family.module is modeling_deepseek_v3:
        for bias in block.buffers():
            bias.zero_()
    return block.to(dtype)


def _mixtral(settings: dict[str, Any], experts: Experts) -> nn.Module:
    settings |= {"intermediate_size": experts.ffn, "num_local_experts": experts.num_experts}
    return modeling_mixtral.MixtralSparseMoeBlock(MixtralConfig(**settings))


def _qwen3_moe(settings: dict[str, Any], experts: Experts) -> nn.Module:
    settings |= {"moe_intermediate_size": experts.ffn, "num_experts": experts.num_experts}
    settings |= {"norm_topk_prob": experts.renormalise}
    return modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**settings))


def _deepseek_v3(settings: dict[str, Any], experts: Experts) -> nn.Module:
    settings |= {
        "moe_intermediate_size": experts.ffn,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_experts,
        "routed_scaling_factor": experts.gate_scale,
        "norm_topk_prob": experts.renormalise,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
    }
    return modeling_deepseek_v3.DeepseekV3MoE(DeepseekV3Config(**settings))


def named_as_ours(tensors: Tensors) -> Tensors:
    """Return weights (or gradients) of a block of transformers by the names of our mixture."""
    named: Tensors = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        if first == "gate":
            named["router.weight"] = tensor
        elif first == "shared_experts":
            named[f"shared.{rest.replace('_proj', '')}"] = tensor
        elif rest == "down_proj":
            named |= {f"experts.{e}.down.weight": one for e, one in enumerate(tensor)}
        else:
            for e, one in enumerate(tensor):
                gate, up = one.chunk(2)
                named |= {f"experts.{e}.gate.weight": gate, f"experts.{e}.up.weight": up}
    return named


def give_weights(block: nn.Module, mixture: MixtureOfExperts) -> None:
    """Copy the weights of a block of transformers into our mixture, all of them."""
    values = named_as_ours(dict(block.named_parameters()))
    with torch.no_grad():
        for name, parameter in mixture.named_parameters():
            parameter.copy_(values.pop(name))
    assert not values


def selection_bias(block: nn.Module) -> torch.Tensor:
    """Return the bias that takes part in the choice of experts."""
    (bias,) = block.buffers()
    return bias
