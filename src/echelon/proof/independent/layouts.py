# SPDX-License-Identifier: Apache-2.0
"""Dense models in checkpoints of torchtitan and Megatron-core, written down from their sources.

torchtitan's Llama 3 turns neighbours of a head: dims (2 i, 2 i + 1) are the pair that turns here
with dims (i, i + half). Qwen 3, which has norms of heads, turns halves. Megatron-core's GPTModel
stacks all layers in one tensor; `linear_qkv` has, for each key/value head, the rows of its query
heads, then of the key, then of the value; `linear_fc1` has the gate, then the up projection; and a
norm belongs to the linear layer that reads it (Transformer Engine).

Shape suffixes: L layers, R rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from echelon.core.model_shape import ModelShape

_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """A layout of the weights of a dense decoder with RMSNorm."""

    weights: Callable[[ModelShape, _Tensors], dict[str, torch.Tensor]]
    """Weights by our names; KeyError or RuntimeError if the stored tensors do not fit."""

    def has(self, model: ModelShape) -> bool:
        """True if the weights of a model can be read."""
        biases = model.qkv_bias or model.output_bias or model.mlp_bias
        plain = model.experts is None and model.latent is None and not model.sinks
        rotary = model.positions == "rope" and model.norm == "rmsnorm"
        placed = model.norm_place == "before" and model.residual == "sequential"
        return plain and rotary and placed and model.gated and not biases


def _torchtitan(model: ModelShape, tensors: _Tensors) -> dict[str, torch.Tensor]:
    weights = {
        "embedding.weight": tensors["tok_embeddings.weight"],
        "norm.weight": tensors["norm.weight"],
    }
    if not model.tied:
        weights["head.weight"] = tensors["lm_head.weight"]
    for number in range(model.layers):
        block = f"layers.{number}."
        for own, theirs in _TORCHTITAN.items():
            weight = tensors[f"{block}{theirs}.weight"]
            if own in ("attention.q", "attention.k") and not model.qk_norm:
                weight = weight.unflatten(0, (-1, model.head_dim // 2, 2)).transpose(1, 2)
                weight = weight.flatten(0, 2)
            weights[f"{block}{own}.weight"] = weight
        for norm in ("q_norm", "k_norm") if model.qk_norm else ():
            weights[f"{block}attention.{norm}.weight"] = tensors[f"{block}attention.{norm}.weight"]
    return weights


_TORCHTITAN = {
    "attention_norm": "attention_norm",
    "attention.q": "attention.qkv_linear.wq",
    "attention.k": "attention.qkv_linear.wk",
    "attention.v": "attention.qkv_linear.wv",
    "attention.o": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}


def _megatron(model: ModelShape, tensors: _Tensors) -> dict[str, torch.Tensor]:
    weights = {
        "embedding.weight": tensors["embedding.word_embeddings.weight"][: model.vocab],
        "norm.weight": tensors["decoder.final_layernorm.weight"],
    }
    if not model.tied:
        weights["head.weight"] = tensors["output_layer.weight"][: model.vocab]
    queries = model.heads // model.kv_heads
    for number in range(model.layers):
        block = f"layers.{number}."

        def layer(name: str, number: int = number) -> torch.Tensor:
            return tensors[f"decoder.layers.{name}"][number]

        qkv = layer("self_attention.linear_qkv.weight")
        grouped = qkv.unflatten(0, (model.kv_heads, queries + 2, model.head_dim))
        heads = grouped.split([queries, 1, 1], dim=1)
        for own, rows in zip(("q", "k", "v"), heads, strict=True):
            weights[f"{block}attention.{own}.weight"] = rows.flatten(0, 2)
        gate, up = layer("mlp.linear_fc1.weight").chunk(2)
        weights |= {
            f"{block}attention_norm.weight": layer("self_attention.linear_qkv.layer_norm_weight"),
            f"{block}attention.o.weight": layer("self_attention.linear_proj.weight"),
            f"{block}mlp_norm.weight": layer("mlp.linear_fc1.layer_norm_weight"),
            f"{block}mlp.gate.weight": gate,
            f"{block}mlp.up.weight": up,
            f"{block}mlp.down.weight": layer("mlp.linear_fc2.weight"),
        }
        for norm in ("q", "k") if model.qk_norm else ():
            weight = layer(f"self_attention.{norm}_layernorm.weight")
            weights[f"{block}attention.{norm}_norm.weight"] = weight
    return weights


def joined_ranks(ranks: Mapping[tuple[int, int], _Tensors]) -> dict[str, torch.Tensor]:
    """Return the tensors of Megatron-core of which each (stage, tensor rank) has a part."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for stage in sorted({stage for stage, _ in ranks}):
        parts = [ranks[place] for place in sorted(ranks) if place[0] == stage]
        # Layers of a stage are numbered from 0.
        for key in sorted(parts[0], key=_layer_of):
            prefix, _, path = key.partition("layers.")
            name = f"{prefix}layers.{path.partition('.')[2]}" if path else key
            tensors.setdefault(name, []).append(_joined(key, [part[key] for part in parts]))
    return {
        key: torch.stack(found) if "layers." in key else found[0] for key, found in tensors.items()
    }


def _layer_of(key: str) -> int:
    path = key.partition("layers.")[2]
    return int(path.partition(".")[0]) if path else -1


def _joined(key: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of which each tensor rank has rows, columns, or all."""
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat(parts, dim=1)
    if key.endswith("linear_fc1.weight"):
        # Each rank has rows of the gate above the same rows of the up projection.
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[place] for place in range(2) for half in halves])
    if key.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        return torch.cat(parts)
    return parts[0]


LAYOUTS: Mapping[str, TrainerLayout] = {
    "dcp": TrainerLayout(weights=_torchtitan),
    "megatron": TrainerLayout(weights=_megatron),
}
"""The layout of each format of an export that has the names of a trainer."""
