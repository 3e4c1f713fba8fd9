# SPDX-License-Identifier: Apache-2.0
"""Under which name, and how laid out, files of weights keep each parameter.

A base model without a head lacks the first part of each name. A file is known by its keys alone:
the key of the embedding says the family, that of a fused matrix how it is laid out. Checkpoints of
trainers have names of their own: `torchtitan.py`, `megatron.py`.

Llama, Mistral, Qwen, DeepSeek, Gemma, Granite and SmolLM3 share one set of names; Phi-3 and GLM put
matrices together in it, StarCoder2 has names of its own for the MLP. GPT-NeoX and Falcon keep q, k
and v of each key head together. DeepSeek has latent attention, with rotary dims in another order.
GPT-2 keeps matrices as [in, out], with q, k and v side by side.

Files of Qwen and DeepSeek have the matrices of each expert under the names of a dense MLP, those of
Mixtral call them w1, w3 and w2. transformers 5 holds the experts of a block in two tensors: gate
and up of an expert, one after the other, in [E, 2 F, D], and down in [E, D, F]. gpt-oss has
[in, out] there: gate and up by turns in the columns of [E, D, 2 F], down in [E, F, D], and biases
beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, parameters, router_biases
from echelon.interop.weight_names import megatron, torchtitan
from echelon.interop.weight_names.source import HeadRows, ParameterSource, RotaryPairs

_QKV = ("attention.q", "attention.k", "attention.v")
_GATE_UP = ("mlp.gate", "mlp.up")
_SINKS = "attention.sinks"
"""What files hold without a module around it."""
_TURNED = ("attention.q", "attention.k", "attention.q_norm", "attention.k_norm")
"""What has a row for each dim of heads that turn."""

Fused = Literal["one-after-other", "by-head"]

MixtureKind = Literal["each", "mixtral", "fused", "by-turns"]

ROUTER_BIAS = ".e_score_correction_bias"
"""How DeepSeek's files call what is added to scores for the choice of experts."""

_PREDICTOR = ".eh_proj.weight"
"""A part that only layers have that predict the token after the next one."""

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}

_NOT_WEIGHTS = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *("rotary_pos_emb.inv_freq", "_extra_state", "freqs_cis"),
)
"""Constants that older files, and trainers, keep beside the weights."""

_ROUTER_BIASES = (
    *(ROUTER_BIAS, torchtitan.ROUTER_BIAS, torchtitan.OLDER_ROUTER_BIAS, megatron.ROUTER_BIAS),
)
_NORM = "norm.weight"
"""How the names of weights of norms end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNaming:
    """Hold where files with one kind of names keep the parameters of a model.

    `sources` has the biases of routers too, where the file has any: without them they are zero.
    `nameless` are parameters that such files cannot hold; `head` is the key of the head, which a
    file of a tied model may hold too; keys that begin as one of `beyond` are no part of it.
    """

    kind: str
    sources: Mapping[str, ParameterSource]
    nameless: tuple[str, ...]
    head: str
    beyond: tuple[str, ...] = ()

    def passes_over(self, key: str) -> bool:
        """Return whether a tensor is no parameter of any model with these names."""
        if self.kind == "Echelon":
            return False
        return key.endswith(_NOT_WEIGHTS) or key.startswith(self.beyond)


def find_naming(shape: ModelShape, keys: Collection[str]) -> WeightNaming | None:
    """Return how a file with these keys names the parameters of a model; None if not known."""
    specs = parameters(shape)
    biases = {spec.name for spec in router_biases(shape)}
    if any(key in biases or key.endswith(_ROUTER_BIASES) for key in keys):
        specs += router_biases(shape)
    if EMBEDDING in keys:
        return _naming(
            "Echelon", specs, lambda spec: ParameterSource(key=spec.name, shape=spec.shape), HEAD
        )
    # Their keys are longer: Megatron-core calls its embedding as Falcon does, inside a module.
    if (trainer := _trainer_naming(shape, specs, keys)) is not None:
        return trainer
    for family in FAMILIES:
        embedding = f"{family.modules['embedding']}.weight"
        found = [key for key in keys if key == embedding or key.endswith(f".{embedding}")]
        if found:
            # Layers that predict more tokens may have copies, under longer keys.
            prefix = min(found, key=len).removesuffix(embedding)
            naming = _hugging_face(family, shape, specs, prefix, keys)
            return replace(naming, beyond=find_predictors(prefix, shape.layers, keys))
    return None


def _trainer_naming(
    shape: ModelShape, specs: tuple[ParameterSpec, ...], keys: Collection[str]
) -> WeightNaming | None:
    """Return how a trainer with names of its own calls the parameters; None if not known."""
    for kind, embedding, find in (
        ("torchtitan", torchtitan.EMBEDDING_KEY, torchtitan.torchtitan_source),
        ("Megatron-core", megatron.EMBEDDING_KEY, megatron.megatron_source),
    ):
        found = [key for key in keys if key == embedding or key.endswith(f".{embedding}")]
        if found:
            prefix, there = min(found, key=len).removesuffix(embedding), frozenset(keys)
            head = f"{prefix}{megatron.HEAD_KEY}"
            if kind == "torchtitan":
                head = torchtitan.torchtitan_head(prefix, there)
            return _naming(kind, specs, partial(find, shape, prefix=prefix, keys=there), head)
    return None


def _hugging_face(
    family: NameFamily,
    shape: ModelShape,
    specs: tuple[ParameterSpec, ...],
    prefix: str,
    keys: Collection[str],
) -> WeightNaming:
    outer = prefix.removesuffix(f"{family.base}.")
    # transformers 5 has one name for all heads, and another one in files of GPT-NeoX.
    heads = [f"{outer}{name}.weight" for name in (family.head, "lm_head")]
    head = next((one for one in heads if one in keys), heads[0])
    family = family.of_keys(shape, keys)
    mixture = find_mixture_kind(keys)
    mixtures = tuple(
        f"layers.{layer}.mlp." for layer in range(shape.layers) if shape.layer_has_experts(layer)
    )

    def find(spec: ParameterSpec) -> ParameterSource | None:
        if spec.name == HEAD:
            return ParameterSource(key=head, shape=spec.shape)
        if shape.experts and spec.name.startswith(mixtures):
            block = f"{prefix}{family.blocks}.{spec.layer}."
            return mixture_source(mixture, shape.experts, spec, block)
        source = block_source(family, shape, spec, prefix)
        if source is None or not spec.name.endswith(_NORM):
            return source
        return replace(source, offset=shape.norm_offset)

    return _naming(family.name, specs, find, head)


def _naming(
    kind: str,
    specs: tuple[ParameterSpec, ...],
    find: Callable[[ParameterSpec], ParameterSource | None],
    head: str,
) -> WeightNaming:
    found = {spec.name: find(spec) for spec in specs}
    return WeightNaming(
        kind=kind,
        sources={name: source for name, source in found.items() if source is not None},
        nameless=tuple(name for name, source in found.items() if source is None),
        head=head,
    )


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


def find_mixture_kind(keys: Collection[str]) -> MixtureKind:
    """Return how a file with these keys holds experts."""
    if any(key.endswith(".mlp.experts.gate_up_proj_bias") for key in keys):
        return "by-turns"
    if any(key.endswith(".mlp.experts.gate_up_proj") for key in keys):
        return "fused"
    if any(".block_sparse_moe." in key for key in keys):
        return "mixtral"
    return "each"


def find_predictors(prefix: str, layers: int, keys: Collection[str]) -> tuple[str, ...]:
    """Return how the keys of layers begin that follow a model of `layers`, to predict more tokens.

    They are no part of the decoder (DeepSeek-V3, 2024, section 2.2), and transformers drops them.
    """
    blocks = (key.removesuffix(_PREDICTOR) for key in keys if key.endswith(_PREDICTOR))
    after = {f"{prefix}layers.{layer}" for layer in range(layers, layers + 8)}
    return tuple(f"{block}." for block in blocks if block in after)


def mixture_source(
    kind: MixtureKind, experts: Experts, spec: ParameterSpec, block: str
) -> ParameterSource | None:
    """Return where a file keeps a part of the mixture of experts of a block; None if nowhere.

    `block` is how the keys of the block begin.
    """
    *_, name, leaf = spec.name.split(".")
    home = f"{block}block_sparse_moe" if kind == "mixtral" else f"{block}mlp"
    if kind == "by-turns" and spec.expert is None:
        keys = {"router": f"{home}.router.weight", "logit_bias": f"{home}.router.bias"}
        return ParameterSource(key=keys[name], shape=spec.shape) if name in keys else None
    if kind == "by-turns":
        return _by_turns(experts, spec, f"{home}.experts")
    if name == "logit_bias":
        return None
    if name == "router":
        key = f"{home}.gate.weight" if leaf == "weight" else f"{home}.gate{ROUTER_BIAS}"
        return ParameterSource(key=key, shape=spec.shape)
    if spec.expert is None:
        return ParameterSource(key=f"{home}.shared_experts.{name}_proj.{leaf}", shape=spec.shape)
    if kind == "fused":
        return _fused(experts, spec, f"{home}.experts") if leaf == "weight" else None
    part = _MIXTRAL[name] if kind == "mixtral" else f"{name}_proj"
    return ParameterSource(key=f"{home}.experts.{spec.expert}.{part}.{leaf}", shape=spec.shape)


def _fused(experts: Experts, spec: ParameterSpec, home: str) -> ParameterSource:
    assert spec.expert is not None
    out, inner = spec.shape
    if spec.name.endswith(".down.weight"):
        shape = (experts.num_experts, out, inner)
        return ParameterSource(key=f"{home}.down_proj", shape=shape, start=spec.expert * out)
    start = 2 * spec.expert * out + (out if spec.name.endswith(".up.weight") else 0)
    shape = (experts.num_experts, 2 * out, inner)
    return ParameterSource(key=f"{home}.gate_up_proj", shape=shape, start=start)


def _by_turns(experts: Experts, spec: ParameterSpec, home: str) -> ParameterSource:
    """Return where a part of an expert is in a tensor that has out as its last dim."""
    assert spec.expert is not None
    out, *inner = spec.shape
    *_, name, leaf = spec.name.split(".")
    turns, part = (1, "down") if name == "down" else (2, "gate_up")
    return ParameterSource(
        key=f"{home}.{part}_proj" + ("_bias" if leaf == "bias" else ""),
        shape=(experts.num_experts, *inner, turns * out),
        start=int(name == "up"),
        transposed=True,
        row=spec.expert * (inner[0] if inner else 1),
        step=turns,
    )
