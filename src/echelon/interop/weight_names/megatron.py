# SPDX-License-Identifier: Apache-2.0
"""How Megatron-core names the weights of a GPTModel, and how it lays several into one tensor.

The names are those of a layer by itself, `decoder.layers.3.`; in a distributed checkpoint all
layers stand in one tensor, `decoder.layers.`, whose first dim counts them. Experts of a layer stand
in one tensor there, too, `mlp.experts.experts.`, or each in one of its own; in older folders each
is by itself, under the name of a SequentialMLP or of a TEGroupedMLP.
"""

from __future__ import annotations

from collections.abc import Collection

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import HEAD, ParameterSpec
from echelon.interop.weight_names.source import HeadRows, ParameterSource

EMBEDDING_KEY = "embedding.word_embeddings.weight"
"""The key by which these names are known."""
HEAD_KEY = "output_layer.weight"
LAYERS = "decoder.layers."
"""How the keys of blocks begin."""

_NAMES = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "attention.o": "self_attention.linear_proj",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "mlp.down": "mlp.linear_fc2",
}

_QKV = "self_attention.linear_qkv"
_GATE_UP = "mlp.linear_fc1"

EXPERTS_KEY = f"{LAYERS}0.mlp.experts.experts.linear_fc1.weight"
"""A key of the first layer of experts in a distributed checkpoint, all in one."""
ROUTER_BIAS = ".mlp.router.expert_bias"

_NORMS = {
    "attention_norm": ("input_layernorm.", f"{_QKV}.layer_norm_"),
    "mlp_norm": ("pre_mlp_layernorm.", f"{_GATE_UP}.layer_norm_"),
}
"""A norm by itself, and in the linear layer that follows it, as Transformer Engine has it."""


def megatron_source(
    shape: ModelShape, spec: ParameterSpec, prefix: str, keys: Collection[str]
) -> ParameterSource | None:
    """Return where Megatron-core keeps a parameter; None where it has no name for it."""
    if shape.latent is not None:
        return None
    if spec.name == HEAD:
        return ParameterSource(key=f"{prefix}{HEAD_KEY}", shape=spec.shape, padded=True)
    module, _, leaf = spec.name.rpartition(".")
    block = ""
    if spec.layer is not None:
        _, layer, module = module.split(".", 2)
        block = f"{LAYERS}{layer}."
    home = f"{prefix}{block}"
    mixture = spec.layer is not None and shape.layer_has_experts(spec.layer)
    if mixture and module.startswith("mlp."):
        return _of_mixture(shape, spec, f"{home}mlp.", keys)
    if module in _NORMS:
        own, fused = (f"{home}{name}{leaf}" for name in _NORMS[module])
        alone = own in keys or (mixture and module == "mlp_norm" and fused not in keys)
        return ParameterSource(key=own if alone else fused, shape=spec.shape)
    if module in ("attention.q", "attention.k", "attention.v"):
        return _in_turns(shape, spec, f"{home}{_QKV}.{leaf}", module[-1])
    if module in ("mlp.gate", "mlp.up"):
        return _gate_or_up(shape, spec, f"{home}{_GATE_UP}.{leaf}", module)
    if module not in _NAMES:
        return None
    key = f"{home}{_NAMES[module]}.{leaf}"
    return ParameterSource(key=key, shape=spec.shape, padded=module == "embedding")


def _in_turns(shape: ModelShape, spec: ParameterSpec, key: str, part: str) -> ParameterSource:
    """Return the rows of queries, keys or values, which lie by key/value head."""
    head = shape.head_dim
    queries = shape.heads // shape.kv_heads * head
    period = queries + 2 * head
    start, size = {"q": (0, queries), "k": (queries, head), "v": (queries + head, head)}[part]
    return ParameterSource(
        key=key,
        shape=(period * shape.kv_heads, *spec.shape[1:]),
        order=HeadRows(width=size, group_rows=period, start=start),
    )


def _gate_or_up(shape: ModelShape, spec: ParameterSpec, key: str, module: str) -> ParameterSource:
    """Return the rows of a gate, or those of what it gates, which lie after it."""
    rows = spec.shape[0]
    whole = (2 * rows if shape.gated else rows, *spec.shape[1:])
    start = rows if shape.gated and module == "mlp.up" else 0
    return ParameterSource(key=key, shape=whole, start=start)


def _of_mixture(
    shape: ModelShape, spec: ParameterSpec, home: str, keys: Collection[str]
) -> ParameterSource | None:
    """Return where a part of a mixture of experts is."""
    *_, name, leaf = spec.name.split(".")
    if name == "router":
        key = f"{home}router.{'weight' if leaf == 'weight' else 'expert_bias'}"
        return ParameterSource(key=key, shape=spec.shape)
    if name not in ("gate", "up", "down"):
        return None
    layer = "linear_fc2" if name == "down" else "linear_fc1"
    if spec.expert is None:
        return _expert_source(shape, spec, f"{home}shared_experts.{layer}.{leaf}", None)
    together = f"{home}experts.experts.{layer}.{leaf}"
    if together in keys:
        return _expert_source(shape, spec, together, spec.expert)
    each = (
        f"{home}experts.{layer}.{leaf}{spec.expert}",
        f"{home}experts.experts.{spec.expert}.{layer}.{leaf}",
        f"{home}experts.local_experts.{spec.expert}.{layer}.{leaf}",
    )
    return _expert_source(shape, spec, next((one for one in each if one in keys), each[-1]), None)


def _expert_source(
    shape: ModelShape, spec: ParameterSpec, key: str, expert: int | None
) -> ParameterSource:
    """Return the rows of a part of an expert in a tensor of its own, or in one of all experts."""
    module = f"mlp.{spec.name.split('.')[-2]}"
    if module == "mlp.down":
        source = ParameterSource(key=key, shape=spec.shape)
    else:
        source = _gate_or_up(shape, spec, key, module)
    if expert is None:
        return source
    assert shape.experts is not None, "an expert has others"
    return ParameterSource(
        key=key,
        shape=(shape.experts.num_experts, *source.shape),
        start=expert * source.shape[0] + source.start,
    )
