"""Under which name, and how laid out, files of weights keep each parameter.

Llama, Mistral, Mixtral, Qwen and DeepSeek share one set of names, but for their experts and for
latent attention, where DeepSeek also has rotary dims in another order. GPT-2 has its own names and
keeps matrices as [in, out] with q, k and v side by side. A base model without a head lacks the
first part of each name.

Files of Qwen and DeepSeek have the matrices of each expert under the names of a dense MLP, those of
Mixtral call them w1, w3 and w2. transformers 5 holds the experts of a block in two tensors: gate
and up of an expert, one after the other, in [E, 2 F, D], and down in [E, D, F].

Checkpoints of trainers have names of their own: `torchtitan.py`, `megatron.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, parameters, router_biases
from echelon.interop.weight_names import megatron, torchtitan
from echelon.interop.weight_names.source import ParameterSource, RotaryPairs

MixtureKind = Literal["each", "mixtral", "fused"]

ROUTER_BIAS = ".e_score_correction_bias"
"""How DeepSeek's files call what is added to scores for the choice of experts."""

_PREDICTOR = ".eh_proj.weight"
"""A part that only layers have that predict the token after the next one."""

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def find_mixture_kind(keys: Collection[str]) -> MixtureKind:
    """Return how a file with these keys holds experts."""
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

_GPT2 = {
    "embedding": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

_NOT_WEIGHTS = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *("rotary_pos_emb.inv_freq", "_extra_state", "freqs_cis"),
)
"""Constants that older files, and trainers, keep beside the weights."""


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
    if any(key in biases or key.endswith(ROUTER_BIAS) for key in keys):
        specs += router_biases(shape)
    if EMBEDDING in keys:
        return _naming(
            "Echelon", specs, lambda spec: ParameterSource(key=spec.name, shape=spec.shape), HEAD
        )
    for kind, embedding in (("Llama", "embed_tokens.weight"), ("GPT-2", "wte.weight")):
        found = [key for key in keys if key == embedding or key.endswith(f".{embedding}")]
        if found:
            # Layers that predict more tokens may have copies, under longer keys.
            prefix = min(found, key=len).removesuffix(embedding)
            naming = _hugging_face(kind, shape, specs, prefix, keys)
            return replace(naming, beyond=find_predictors(prefix, shape.layers, keys))
    return _trainer_naming(shape, specs, keys)


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
    kind: str,
    shape: ModelShape,
    specs: tuple[ParameterSpec, ...],
    prefix: str,
    keys: Collection[str],
) -> WeightNaming:
    outer = prefix.removesuffix("model.").removesuffix("transformer.")
    head = f"{outer}lm_head.weight"
    mixture = find_mixture_kind(keys)
    mixtures = tuple(
        f"layers.{layer}.mlp." for layer in range(shape.layers) if shape.layer_has_experts(layer)
    )

    def find(spec: ParameterSpec) -> ParameterSource | None:
        if spec.name == HEAD:
            return ParameterSource(key=head, shape=spec.shape)
        if kind == "GPT-2":
            return _gpt2_source(shape, spec, prefix)
        if shape.experts and spec.name.startswith(mixtures):
            block = f"{prefix}layers.{spec.layer}."
            return mixture_source(mixture, shape.experts, spec, block)
        return _llama_source(shape, spec, prefix)

    return _naming(kind, specs, find, head)


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


def _split(spec: ParameterSpec) -> tuple[str, str, str]:
    """Return the block, the module in it and the last part of a parameter's name."""
    module, _, leaf = spec.name.rpartition(".")
    if spec.layer is None:
        return "", module, leaf
    _, layer, module = module.split(".", 2)
    return layer, module, leaf


def _llama_source(shape: ModelShape, spec: ParameterSpec, prefix: str) -> ParameterSource | None:
    layer, module, leaf = _split(spec)
    names = _LLAMA if shape.latent is None else {**_LLAMA, **_LATENT}
    if module not in names:
        return None
    block = f"layers.{layer}." if layer else ""
    return ParameterSource(
        key=f"{prefix}{block}{names[module]}.{leaf}",
        shape=spec.shape,
        pairs=_pairs(shape.latent, module),
    )


def _pairs(latent: LatentAttention | None, module: str) -> RotaryPairs | None:
    """Return which rows turn with the position, where a file has them in another order."""
    if latent is None or module not in ("attention.q_up", "attention.kv_down"):
        return None
    start = latent.nope_dim if module == "attention.q_up" else latent.kv_rank
    return RotaryPairs(period=start + latent.rope_dim, start=start)


def _gpt2_source(shape: ModelShape, spec: ParameterSpec, prefix: str) -> ParameterSource | None:
    layer, module, leaf = _split(spec)
    if module not in _GPT2:
        return None
    block = f"h.{layer}." if layer else ""
    key = f"{prefix}{block}{_GPT2[module]}.{leaf}"
    out, start = spec.shape[0], 0
    if _GPT2[module] == "attn.c_attn":
        query, kv = shape.query_dim, shape.kv_dim
        out = query + 2 * kv
        start = {"attention.q": 0, "attention.k": query, "attention.v": query + kv}[module]
    if layer and len(spec.shape) == 2:
        return ParameterSource(key=key, shape=(spec.shape[1], out), start=start, transposed=True)
    return ParameterSource(key=key, shape=(out, *spec.shape[1:]), start=start)
