# SPDX-License-Identifier: Apache-2.0
"""Under which name, and how laid out, files of weights keep each parameter.

`families.py` has the names of each family; experts are in `mixtures.py`. A base model without a
head lacks the first part of each name. A file is known by its keys alone: that of the embedding
says the family, that of a fused matrix how it is laid out. Checkpoints of trainers have names of
their own: `torchtitan.py`, `megatron.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, parameters, router_biases
from echelon.interop.weight_names import megatron, torchtitan
from echelon.interop.weight_names.families import FAMILIES, NameFamily, block_source
from echelon.interop.weight_names.mixtures import (
    ROUTER_BIAS,
    find_mixture_kind,
    find_predictors,
    mixture_source,
)
from echelon.interop.weight_names.source import ParameterSource

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
