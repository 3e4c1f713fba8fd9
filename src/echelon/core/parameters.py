# SPDX-License-Identifier: Apache-2.0
"""Every parameter of a model: canonical name, shape, how tensor parallelism splits it, first value.

This table is the one description of the weights: initialisation, tensor slicing, byte formulas,
checkpoints and the prover all read it. Weights are stored [out, in], so a column-parallel matrix
(Megatron-LM, section 3) is split along dim 0 and a row-parallel one along dim 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Literal

from echelon.core.choices.lora import LATENT_GROUPS, LINEAR_GROUPS, LORA_A, LORA_B, Lora
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.units import short_count

Initial = Literal["normal", "residual", "ones", "zeros", "fan-in"]

EMBEDDING = "embedding.weight"
HEAD = "head.weight"
ROUTER = ".router.weight"
"""How the names of routers end."""
LOGIT_BIAS = ".logit_bias.weight"
"""How the names of the biases of their logits end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """Describe one parameter of the whole (unsplit) model.

    `layer` is the block that owns it (None: before the first or after the last block), `expert`
    the routed expert of that block (None: every rank of the stage holds it), `split_dim` the dim
    cut over `tp` or, of a routed expert, over `expert_tp` (None: each tensor rank holds all of
    it), `padded` whether that dim is first padded to a multiple of the degree (the vocabulary),
    `frozen` whether it never changes: it has no gradient and no state of an optimizer.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    split_dim: int | None = None
    padded: bool = False
    expert: int | None = None
    initial: Initial = "normal"
    frozen: bool = False

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole parameter."""
        return prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one of `tp` tensor ranks holds, padding included."""
        if self.split_dim is None:
            return self.shape
        size = self.shape[self.split_dim]
        if size % tp and not self.padded:
            raise ValueError(f"{self.name}: dim {self.split_dim} = {size} is not divisible by {tp}")
        local = -(-size // tp)
        return (*self.shape[: self.split_dim], local, *self.shape[self.split_dim + 1 :])

    def local_numel(self, tp: int) -> int:
        """Return the number of elements that one of `tp` tensor ranks holds, padding included."""
        if tp == 1 or self.split_dim is None:
            return prod(self.shape)
        return prod(self.local_shape(tp))

    def local_range(self, tp: int, tp_rank: int) -> tuple[int, int]:
        """Return the half-open range of `split_dim` that is real (not padding) on `tp_rank`."""
        assert self.split_dim is not None
        size = self.shape[self.split_dim]
        local = -(-size // tp)
        return min(size, tp_rank * local), min(size, (tp_rank + 1) * local)


@lru_cache(maxsize=4)
def parameters(shape: ModelShape) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a model in the order in which a forward pass meets them.

    Kept for the models asked for last: with hundreds of experts there are tens of thousands.
    """
    return tuple(_parameters(shape))


def router_biases(shape: ModelShape) -> tuple[ParameterSpec, ...]:
    """Return the biases of the routers: no gradient moves them, so they are not parameters."""
    if shape.experts is None or not shape.experts.router_bias:
        return ()
    size = (shape.experts.num_experts,)
    return tuple(
        ParameterSpec(name=router_bias_name(layer), shape=size, layer=layer, initial="zeros")
        for layer in range(shape.layers)
        if shape.layer_has_experts(layer)
    )


def router_bias_name(layer: int) -> str:
    """Return the canonical name of the bias of the router of a block."""
    return f"layers.{layer}.mlp.router.bias"


def family_of(name: str) -> str:
    """Return the name of a parameter without its block."""
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def num_parameters(shape: ModelShape) -> int:
    """Return the number of weights of a model, each counted once (tied weights too)."""
    return sum(spec.numel for spec in (*parameters(shape), *router_biases(shape)))


def num_active_parameters(shape: ModelShape) -> int:
    """Return the number of weights that one token meets: of the routed experts, only its top k."""
    total = num_parameters(shape)
    if shape.experts is None:
        return total
    moe_layers = sum(shape.layer_has_experts(layer) for layer in range(shape.layers))
    per_expert = sum(spec.numel for spec in _expert(shape, shape.experts, "expert", 0))
    idle = shape.experts.num_experts - shape.experts.top_k
    return total - moe_layers * idle * per_expert


def parameters_text(shape: ModelShape) -> str:
    """Return the number of parameters as text, of a mixture with the active parameters."""
    text = f"{short_count(num_parameters(shape))} parameters"
    if shape.experts is None:
        return text
    return f"{text} ({short_count(num_active_parameters(shape))} active)"


def num_trained_parameters(shape: ModelShape) -> int:
    """Return the number of weights that training moves: all, or those of adapters."""
    return sum(spec.numel for spec in parameters(shape) if not spec.frozen)


def base_shape(shape: ModelShape) -> ModelShape:
    """Return the shape without adapters, whose parameters are all trained."""
    return replace(shape, lora=None)


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a matrix of an adapter."""
    return name.endswith((f".{LORA_A}.weight", f".{LORA_B}.weight"))


def _parameters(shape: ModelShape) -> Iterator[ParameterSpec]:
    if shape.lora is None:
        yield from _base_parameters(shape)
        return
    for layer, specs in groupby(_base_parameters(shape), key=lambda spec: spec.layer):
        kept = list(specs)
        yield from (replace(spec, frozen=True) for spec in kept)
        if layer is not None:
            yield from _adapters(shape.lora, {spec.name: spec for spec in kept}, layer)


def _adapters(
    lora: Lora, linears: Mapping[str, ParameterSpec], layer: int
) -> Iterator[ParameterSpec]:
    """Yield the adapters of a block: of layers that read the same input all A, then all B."""
    for group in (*LATENT_GROUPS, *LINEAR_GROUPS):
        part = "mlp" if group in LINEAR_GROUPS[2:] else "attention"
        names = [f"layers.{layer}.{part}.{name}" for name in group if name in lora.targets]
        found = [(name, linears[f"{name}.weight"]) for name in names if f"{name}.weight" in linears]
        for name, linear in found:
            yield ParameterSpec(
                name=f"{name}.{LORA_A}.weight",
                shape=(lora.rank, linear.shape[1]),
                layer=layer,
                split_dim=1 if linear.split_dim == 1 else None,
                initial="fan-in",
            )
        for name, linear in found:
            yield ParameterSpec(
                name=f"{name}.{LORA_B}.weight",
                shape=(linear.shape[0], lora.rank),
                layer=layer,
                split_dim=0 if linear.split_dim == 0 else None,
                initial="zeros",
            )


def _base_parameters(shape: ModelShape) -> Iterator[ParameterSpec]:
    words = (shape.vocab, shape.hidden)
    yield ParameterSpec(name=EMBEDDING, shape=words, layer=None, split_dim=0, padded=True)
    if shape.positions == "learned":
        table = (shape.max_positions, shape.hidden)
        yield ParameterSpec(name="positions.weight", shape=table, layer=None)
    for layer in range(shape.layers):
        yield from _block(shape, layer)
    yield from _norm(shape, "norm", None)
    if not shape.tied:
        yield ParameterSpec(name=HEAD, shape=words, layer=None, split_dim=0, padded=True)


def _block(shape: ModelShape, layer: int) -> Iterator[ParameterSpec]:
    prefix = f"layers.{layer}"

    def norm(name: str) -> Iterator[ParameterSpec]:
        return _norm(shape, f"{prefix}.{name}", layer) if name in shape.norms else iter(())

    yield from norm("attention_norm")
    if shape.latent is None:
        yield from _attention(shape, f"{prefix}.attention", layer)
    else:
        yield from _latent_attention(shape, shape.latent, f"{prefix}.attention", layer)
    yield from norm("attention_post_norm")
    yield from norm("mlp_norm")
    if shape.experts is not None and shape.layer_has_experts(layer):
        yield from _experts(shape, shape.experts, f"{prefix}.mlp", layer)
    else:
        yield from _mlp(shape, shape.ffn, f"{prefix}.mlp", layer, bias=shape.mlp_bias)
    yield from norm("mlp_post_norm")


def _norm(shape: ModelShape, name: str, layer: int | None) -> Iterator[ParameterSpec]:
    yield _scale(name, shape.hidden, layer)
    if shape.norm == "layernorm":
        size = (shape.hidden,)
        yield ParameterSpec(name=f"{name}.bias", shape=size, layer=layer, initial="zeros")


def _scale(
    norm: str, size: int, layer: int | None, *, split_dim: int | None = None
) -> ParameterSpec:
    return ParameterSpec(
        name=f"{norm}.weight", shape=(size,), layer=layer, split_dim=split_dim, initial="ones"
    )


def _column(name: str, out: int, inner: int, layer: int, bias: bool) -> Iterator[ParameterSpec]:
    yield ParameterSpec(name=f"{name}.weight", shape=(out, inner), layer=layer, split_dim=0)
    if bias:
        yield ParameterSpec(
            name=f"{name}.bias", shape=(out,), layer=layer, split_dim=0, initial="zeros"
        )


def _row(name: str, out: int, inner: int, layer: int, bias: bool) -> Iterator[ParameterSpec]:
    yield ParameterSpec(
        name=f"{name}.weight", shape=(out, inner), layer=layer, split_dim=1, initial="residual"
    )
    if bias:
        yield ParameterSpec(name=f"{name}.bias", shape=(out,), layer=layer, initial="zeros")


def _attention(shape: ModelShape, name: str, layer: int) -> Iterator[ParameterSpec]:
    bias = shape.qkv_bias
    yield from _column(f"{name}.q", shape.query_dim, shape.hidden, layer, bias)
    yield from _column(f"{name}.k", shape.kv_dim, shape.hidden, layer, bias)
    yield from _column(f"{name}.v", shape.kv_dim, shape.hidden, layer, bias)
    if shape.qk_norm:
        # Over all heads together, the weight is cut as the heads are.
        whole = shape.qk_norm_over == "width"
        for norm, width in (("q_norm", shape.query_dim), ("k_norm", shape.kv_dim)):
            size = width if whole else shape.head_dim
            yield _scale(f"{name}.{norm}", size, layer, split_dim=0 if whole else None)
    if shape.sinks:
        size = (shape.heads,)
        yield ParameterSpec(
            name=f"{name}.sinks.weight", shape=size, layer=layer, split_dim=0, initial="zeros"
        )
    yield from _row(f"{name}.o", shape.hidden, shape.query_dim, layer, shape.output_bias)


def _latent_attention(
    shape: ModelShape, latent: LatentAttention, name: str, layer: int
) -> Iterator[ParameterSpec]:
    head_dim = latent.nope_dim + latent.rope_dim
    kv_dim = latent.nope_dim + latent.value_dim
    width = shape.hidden if latent.query_rank is None else latent.query_rank
    sizes = (
        ("q_down.weight", (width, shape.hidden), None),
        ("q_up.weight", (shape.heads * head_dim, width), 0),
        ("kv_down.weight", (latent.kv_rank + latent.rope_dim, shape.hidden), None),
        ("kv_up.weight", (shape.heads * kv_dim, latent.kv_rank), 0),
    )
    compressed = latent.query_rank is not None
    if compressed:
        yield _scale(f"{name}.q_norm", width, layer)
    yield _scale(f"{name}.kv_norm", latent.kv_rank, layer)
    for suffix, size, split_dim in sizes if compressed else sizes[1:]:
        yield ParameterSpec(name=f"{name}.{suffix}", shape=size, layer=layer, split_dim=split_dim)
    yield from _row(f"{name}.o", shape.hidden, shape.heads * latent.value_dim, layer, False)


def _mlp(
    shape: ModelShape, ffn: int, name: str, layer: int, *, bias: bool
) -> Iterator[ParameterSpec]:
    if shape.gated:
        yield from _column(f"{name}.gate", ffn, shape.hidden, layer, bias)
    yield from _column(f"{name}.up", ffn, shape.hidden, layer, bias)
    yield from _row(f"{name}.down", shape.hidden, ffn, layer, bias)


def _expert(shape: ModelShape, experts: Experts, name: str, layer: int) -> Iterator[ParameterSpec]:
    """Yield the parameters of an expert: its matrices side by side, biases behind them."""
    found = tuple(_mlp(shape, experts.ffn, name, layer, bias=experts.bias))
    yield from (spec for spec in found if len(spec.shape) > 1)
    yield from (spec for spec in found if len(spec.shape) == 1)


def _experts(shape: ModelShape, experts: Experts, name: str, layer: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(
        name=f"{name}{ROUTER}", shape=(experts.num_experts, shape.hidden), layer=layer
    )
    if experts.logit_bias:
        size = (experts.num_experts,)
        yield ParameterSpec(name=f"{name}{LOGIT_BIAS}", shape=size, layer=layer, initial="zeros")
    for expert in range(experts.num_experts):
        for spec in _expert(shape, experts, f"{name}.experts.{expert}", layer):
            yield replace(spec, expert=expert)
    if experts.shared_experts:
        width = experts.ffn * experts.shared_experts
        yield from _mlp(shape, width, f"{name}.shared", layer, bias=shape.mlp_bias)
