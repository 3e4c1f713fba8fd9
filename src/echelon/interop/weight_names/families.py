# SPDX-License-Identifier: Apache-2.0
"""The names of each family of files, and where a matrix is a part of a larger one.

Llama, Mistral, Qwen, DeepSeek, Gemma, Granite and SmolLM3 share one set of names; Phi-3 and GLM put
matrices together in it, StarCoder2 has names of its own for the MLP. GPT-NeoX and Falcon keep q, k
and v of each key head together. DeepSeek has latent attention,
with rotary dims in another order. GPT-2 keeps matrices as [in, out], with q, k and v side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from echelon.core.model_shape import LatentAttention, ModelShape
from echelon.core.parameters import ParameterSpec
from echelon.interop.weight_names.source import HeadRows, ParameterSource, RotaryPairs

_QKV = ("attention.q", "attention.k", "attention.v")
_GATE_UP = ("mlp.gate", "mlp.up")
_SINKS = "attention.sinks"
"""What files hold without a module around it."""
_TURNED = ("attention.q", "attention.k", "attention.q_norm", "attention.k_norm")
"""What has a row for each dim of heads that turn."""

Fused = Literal["one-after-other", "by-head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFamily:
    """Hold the names that files of a family give to modules, by ours.

    Those of a model with a head begin with `base`; block 3 is `blocks`.3 in it. `qkv` says how a
    module that stands for q, k and v has them; gate and up are one after the other. Where
    `transposed`, matrices of blocks are [in, out].
    """

    name: str
    modules: Mapping[str, str]
    base: str = "model"
    blocks: str = "layers"
    head: str = "lm_head"
    qkv: Fused = "one-after-other"
    transposed: bool = False

    def of_keys(self, shape: ModelShape, keys: Collection[str]) -> NameFamily:
        """Return the family with the names that these keys of a file show."""
        modules = dict(self.modules)
        if shape.latent is not None:
            modules |= _LATENT
            if shape.latent.query_rank is None:
                modules["attention.q_up"] = "self_attn.q_proj"
        for shown, names in _SHOWN_BY.items():
            if any(key.endswith(shown) for key in keys):
                modules |= names
        return replace(self, modules=modules)


_LLAMA = {
    "embedding": "embed_tokens",
    "norm": "norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.sinks": "self_attn.sinks",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}

_LATENT = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}

_SHOWN_BY: Mapping[str, Mapping[str, str]] = {
    ".self_attn.qkv_proj.weight": dict.fromkeys(_QKV, "self_attn.qkv_proj"),
    ".mlp.gate_up_proj.weight": dict.fromkeys(_GATE_UP, "mlp.gate_up_proj"),
    ".pre_feedforward_layernorm.weight": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "layers.0.mlp.c_fc.weight": {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    ".post_feedforward_layernorm.weight": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    ".post_mlp_layernorm.weight": {
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    ".ln_mlp.weight": {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
}
"""Names of some models with Llama's names, by the keys that show them."""

_GPT2 = {
    "embedding": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    **dict.fromkeys(_QKV, "attn.c_attn"),
    "attention.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

_NEOX = {
    "embedding": "embed_in",
    "norm": "final_layer_norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **dict.fromkeys(_QKV, "attention.query_key_value"),
    "attention.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

_FALCON = {
    **_NEOX,
    "embedding": "word_embeddings",
    "norm": "ln_f",
    **dict.fromkeys(_QKV, "self_attention.query_key_value"),
    "attention.o": "self_attention.dense",
}

FAMILIES = (
    NameFamily(name="Llama", modules=_LLAMA),
    NameFamily(name="GPT-NeoX", modules=_NEOX, base="gpt_neox", head="embed_out", qkv="by-head"),
    NameFamily(name="Falcon", modules=_FALCON, base="transformer", blocks="h", qkv="by-head"),
    NameFamily(name="GPT-2", modules=_GPT2, base="transformer", blocks="h", transposed=True),
)
"""Each by the key of its embedding."""


def block_source(
    family: NameFamily, shape: ModelShape, spec: ParameterSpec, prefix: str
) -> ParameterSource | None:
    """Return where a file keeps a parameter that is no expert's; None if nowhere.

    `prefix` is how the keys of the model begin.
    """
    layer, module, leaf = _split(spec)
    if module not in family.modules:
        return None
    name = family.modules[module]
    block = f"{family.blocks}.{layer}." if layer else ""
    key = f"{prefix}{block}{name}" + ("" if module == _SINKS else f".{leaf}")
    parts = [one for one in (*_QKV, *_GATE_UP) if family.modules.get(one) == name]
    rows = _rows_of(shape)
    before = sum(rows[one] for one in parts[: parts.index(module)]) if len(parts) > 1 else 0
    out = sum(rows[one] for one in parts) if len(parts) > 1 else spec.shape[0]
    order = _order(family, shape, module, before)
    if family.transposed and layer and len(spec.shape) == 2:
        return ParameterSource(key=key, shape=(spec.shape[1], out), start=before, transposed=True)
    return ParameterSource(
        key=key, shape=(out, *spec.shape[1:]), start=before if order is None else 0, order=order
    )


def _rows_of(shape: ModelShape) -> Mapping[str, int]:
    """Return the rows of matrices that files may put together."""
    return {
        "attention.q": shape.query_dim,
        "attention.k": shape.kv_dim,
        "attention.v": shape.kv_dim,
        **dict.fromkeys(_GATE_UP, shape.ffn),
    }


def _order(
    family: NameFamily, shape: ModelShape, module: str, before: int
) -> HeadRows | RotaryPairs | None:
    """Return the order of rows in the file, where it is another than here."""
    if shape.latent is not None:
        return _pairs(shape.latent, module)
    turned = shape.turned_dims if module in _TURNED else 0
    if family.qkv == "by-head" and module in _QKV:
        # The queries of a key head, that key, and its value, and so on for each key head.
        queries = shape.heads // shape.kv_heads
        place = {"attention.q": 0, "attention.k": queries, "attention.v": queries + 1}[module]
        return HeadRows(
            width=shape.head_dim,
            turned=turned,
            heads=queries if module == "attention.q" else 1,
            group_rows=(queries + 2) * shape.head_dim,
            start=place * shape.head_dim,
        )
    order = HeadRows(
        width=shape.head_dim,
        turned=turned,
        interleaved=shape.rotary.interleaved and turned > 0,
        start=before,
    )
    return None if order.in_order else order


def _pairs(latent: LatentAttention, module: str) -> RotaryPairs | None:
    """Return which rows of latent attention turn with the position."""
    if module not in ("attention.q_up", "attention.kv_down"):
        return None
    start = latent.nope_dim if module == "attention.q_up" else latent.kv_rank
    return RotaryPairs(period=start + latent.rope_dim, start=start)


def _split(spec: ParameterSpec) -> tuple[str, str, str]:
    """Return the block, the module in it and the last part of a parameter's name."""
    module, _, leaf = spec.name.rpartition(".")
    if spec.layer is None:
        return "", module, leaf
    _, layer, module = module.split(".", 2)
    return layer, module, leaf
