"""Under which name, and how laid out, files of weights keep each parameter.

Llama, Mistral and Qwen share one set of names, GPT-2 has its own and keeps matrices as [in, out]
with q, k and v side by side. A base model without a head lacks the first part of each name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, parameters

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

_NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Constants that older files keep beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Say where a file keeps a parameter.

    It is in the tensor `key`, of `shape` there, from `start` on in what is the parameter's dim 0;
    where `transposed`, that dim is the last one there.
    """

    key: str
    shape: tuple[int, ...]
    start: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Hold where files with one kind of names keep the parameters of a model.

    `nameless` are parameters that such files cannot hold; `head` is the key of the head, which a
    file of a tied model may hold too.
    """

    kind: str
    sources: Mapping[str, Source]
    nameless: tuple[str, ...]
    head: str

    def passes_over(self, key: str) -> bool:
        """Return whether a tensor is no parameter of any model with these names."""
        return self.kind != "Echelon" and key.endswith(_NOT_WEIGHTS)


def find_naming(shape: ModelShape, keys: Collection[str]) -> Naming | None:
    """Return how a file with these keys names the parameters of a model; None if not known."""
    if EMBEDDING in keys:
        return _naming("Echelon", shape, lambda spec: Source(key=spec.name, shape=spec.shape), HEAD)
    for kind, embedding in (("Llama", "embed_tokens.weight"), ("GPT-2", "wte.weight")):
        for key in keys:
            if key == embedding or key.endswith(f".{embedding}"):
                prefix = key.removesuffix(embedding)
                return _hugging_face(kind, shape, prefix)
    return None


def _hugging_face(kind: str, shape: ModelShape, prefix: str) -> Naming:
    outer = prefix.removesuffix("model.").removesuffix("transformer.")
    head = f"{outer}lm_head.weight"
    source = _llama_source if kind == "Llama" else _gpt2_source

    def find(spec: ParameterSpec) -> Source | None:
        if spec.name == HEAD:
            return Source(key=head, shape=spec.shape)
        return source(shape, spec, prefix)

    return _naming(kind, shape, find, head)


def _naming(
    kind: str, shape: ModelShape, find: Callable[[ParameterSpec], Source | None], head: str
) -> Naming:
    found = {spec.name: find(spec) for spec in parameters(shape)}
    return Naming(
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


def _llama_source(shape: ModelShape, spec: ParameterSpec, prefix: str) -> Source | None:
    layer, module, leaf = _split(spec)
    if module not in _LLAMA:
        return None
    block = f"layers.{layer}." if layer else ""
    return Source(key=f"{prefix}{block}{_LLAMA[module]}.{leaf}", shape=spec.shape)


def _gpt2_source(shape: ModelShape, spec: ParameterSpec, prefix: str) -> Source | None:
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
        return Source(key=key, shape=(spec.shape[1], out), start=start, transposed=True)
    return Source(key=key, shape=(out, *spec.shape[1:]), start=start)
