# SPDX-License-Identifier: Apache-2.0
"""How torchtitan names the weights of Llama 3 and Qwen 3, and in which order their rows lie.

Experts of a block are stacked: gate (w1), up (w3) and down (w2), each of all of them.
"""

from __future__ import annotations

from collections.abc import Collection

from echelon.core.model_shape import Experts, ModelShape
from echelon.core.parameters import HEAD, ParameterSpec
from echelon.interop.weight_names.source import ParameterSource, RotaryPairs

EMBEDDING_KEY = "tok_embeddings.weight"
"""The key by which these names are known."""

_NAMES = {
    "embedding": "tok_embeddings",
    "norm": "norm",
    "attention_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    "attention.q": "attention.qkv_linear.wq",
    "attention.k": "attention.qkv_linear.wk",
    "attention.v": "attention.qkv_linear.wv",
    "attention.o": "attention.wo",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}

_SHARED = {"gate": "w1", "up": "w3", "down": "w2"}
_STACKED = {"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}
EXPERTS_KEY = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
"""One of the keys of a first block of experts."""
ROUTER_BIAS = ".moe.expert_bias_E"
OLDER_ROUTER_BIAS = ".moe.expert_bias"
"""How what is added to scores was called until 0.2."""

_OLDER = {"attention.q": "wq", "attention.k": "wk", "attention.v": "wv"}
"""Before 0.3 they had no room of their own."""


def torchtitan_head(prefix: str, keys: Collection[str]) -> str:
    """Return the key of the head: until 0.2 it was `output`."""
    older = f"{prefix}output.weight"
    return older if older in keys else f"{prefix}lm_head.weight"


def torchtitan_source(
    shape: ModelShape, spec: ParameterSpec, prefix: str, keys: Collection[str]
) -> ParameterSource | None:
    """Return where torchtitan keeps a parameter; None where it has no name for it.

    Llama 3 turns pairs of neighbours, as Meta's own code does; Qwen 3, which has norms of queries
    and keys, the halves of a head, as is done here.
    """
    if shape.latent is not None or shape.norm != "rmsnorm":
        return None
    if spec.name == HEAD:
        return ParameterSource(key=torchtitan_head(prefix, keys), shape=spec.shape)
    module, _, leaf = spec.name.rpartition(".")
    block = ""
    if spec.layer is not None:
        _, layer, module = module.split(".", 2)
        block = f"layers.{layer}."
        if shape.experts and module.startswith("mlp.") and shape.layer_has_experts(int(layer)):
            return _of_mixture(shape.experts, spec, f"{prefix}{block}moe.", keys)
    if module not in _NAMES or leaf != "weight":
        return None
    name = _NAMES[module]
    if module in _OLDER and not any(".qkv_linear." in key for key in keys):
        name = f"attention.{_OLDER[module]}"
    turns = module in ("attention.q", "attention.k") and not shape.qk_norm
    return ParameterSource(
        key=f"{prefix}{block}{name}.weight",
        shape=spec.shape,
        order=RotaryPairs(period=shape.head_dim, start=0) if turns else None,
    )


def _of_mixture(
    experts: Experts, spec: ParameterSpec, home: str, keys: Collection[str]
) -> ParameterSource | None:
    """Return where a part of a mixture of experts is; until 0.2 experts had other names."""
    *_, name, leaf = spec.name.split(".")
    if name == "router":
        older = f"{home}{OLDER_ROUTER_BIAS.removeprefix('.moe.')}"
        bias = older if older in keys else f"{home}{ROUTER_BIAS.removeprefix('.moe.')}"
        key = f"{home}router.gate.weight" if leaf == "weight" else bias
        return ParameterSource(key=key, shape=spec.shape)
    if leaf != "weight" or name not in _SHARED:
        return None
    if spec.expert is None:
        return ParameterSource(key=f"{home}shared_experts.{_SHARED[name]}.weight", shape=spec.shape)
    key = f"{home}routed_experts.inner_experts.{_STACKED[name]}"
    older = f"{home}experts.{_SHARED[name]}"
    return ParameterSource(
        key=older if older in keys else key,
        shape=(experts.num_experts, *spec.shape),
        start=spec.expert * spec.shape[0],
    )
