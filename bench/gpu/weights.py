"""The same first values in every framework, so that losses can be compared step by step.

Echelon's are a function of seed, name and index. Plain PyTorch and transformers have the same
matrices under other names, those of queries, keys and values or of gate and up in one where they
are one product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.models.counter_random import initial_values

Sources = Mapping[str, tuple[str, ...]]
"""By the name of a parameter, ours that are in it one below the other; {} is the block."""

PLAIN_SOURCES: Sources = {
    "embedding.weight": ("embedding.weight",),
    "norm.weight": ("norm.weight",),
    "head.weight": ("head.weight",),
    "blocks.{}.attention_norm.weight": ("layers.{}.attention_norm.weight",),
    "blocks.{}.qkv.weight": tuple(f"layers.{{}}.attention.{name}.weight" for name in "qkv"),
    "blocks.{}.o.weight": ("layers.{}.attention.o.weight",),
    "blocks.{}.mlp_norm.weight": ("layers.{}.mlp_norm.weight",),
    "blocks.{}.gate_up.weight": ("layers.{}.mlp.gate.weight", "layers.{}.mlp.up.weight"),
    "blocks.{}.down.weight": ("layers.{}.mlp.down.weight",),
}

HUGGING_FACE_SOURCES: Sources = {
    "model.embed_tokens.weight": ("embedding.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("head.weight",),
    "model.layers.{}.input_layernorm.weight": ("layers.{}.attention_norm.weight",),
    **{
        f"model.layers.{{}}.self_attn.{name}_proj.weight": (f"layers.{{}}.attention.{name}.weight",)
        for name in "qkvo"
    },
    "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.mlp_norm.weight",),
    **{
        f"model.layers.{{}}.mlp.{name}_proj.weight": (f"layers.{{}}.mlp.{name}.weight",)
        for name in ("gate", "up", "down")
    },
}


@torch.no_grad()
def set_first_values(model: nn.Module, shape: ModelShape, seed: int, sources: Sources) -> None:
    """Give every parameter of a model the values with which Echelon starts, on its own device."""
    specs = {spec.name: spec for spec in parameters(shape)}
    left = dict(model.named_parameters())
    for layer in range(shape.layers):
        for name, parts in sources.items():
            parameter = left.pop(name.format(layer), None)
            if parameter is None:
                continue  # it belongs to no block, and has its values
            start = 0
            for part in parts:
                spec = specs[part.format(layer)]
                rows = parameter[start : start + spec.shape[0]]
                initial_values(shape, spec, seed, size=spec.shape, into=rows)
                start += spec.shape[0]
    if left:
        raise ValueError(f"no first values for {', '.join(left)}")
