# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: their names, sizes and first values, written down from the documentation.

A matrix is [out, in]. First values are normal with the model's standard deviation; those of the
matrices that write to the residual stream (`o`, `down`) have it divided by sqrt(2 x blocks) (GPT-2,
2019, section 2.3); norms begin with 1, biases with 0, or uniform within a spread around it. The
value at an index is drawn by the key ("parameter", seed, name), rounded to float32.

Over adapters (Hu et al., "LoRA", 2021) all of this is frozen. A layer with one has two matrices
more: A, [rank, in], uniform within 1 / sqrt(in), and B, [out, rank], which begins with 0.

Random numbers are a function of (key, index). The key of some words is the first 8 bytes of the
BLAKE2b hash of their text, joined by zero bytes, as a big-endian number. The bits at an index are
SplitMix64's finaliser (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014) of
key + index x golden ratio, modulo 2^64. Their upper 53 bits, plus a half, over 2^53 are uniform;
the normal value is the quantile of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.core.model_shape import LatentAttention, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """Say how large a weight is, how wide its first values, and whether a block owns it.

    `std` is None where all of them are `constant`.
    """

    shape: tuple[int, ...]
    std: float | None = None
    constant: float = 0.0
    in_block: bool = False
    bound: float | None = None
    """First values are uniform within this, where there is such a bound."""
    frozen: bool = False

    @property
    def is_matrix(self) -> bool:
        """Return whether it has two dims."""
        return len(self.shape) == 2


def weights_of(model: ModelShape) -> dict[str, WeightFacts]:
    """Return every weight of a model by its name, in the order of a forward pass."""
    table: dict[str, WeightFacts] = {}
    wide, std = model.hidden, model.initial_std
    table["embedding.weight"] = WeightFacts(shape=(model.vocab, wide), std=std)
    if model.positions == "learned":
        table["positions.weight"] = WeightFacts(shape=(model.max_positions, wide), std=std)
    for block in range(model.layers):
        own = dict(_block(model, block))
        for name, shape in own.items():
            table[f"layers.{block}.{name}"] = _fact(model, name, shape)
        for name, fact in _adapters(model, own):
            table[f"layers.{block}.{name}"] = fact
    table["norm.weight"] = WeightFacts(shape=(wide,), constant=1.0)
    if model.norm == "layernorm":
        table["norm.bias"] = WeightFacts(shape=(wide,))
    if not model.tied:
        table["head.weight"] = WeightFacts(shape=(model.vocab, wide), std=std)
    if model.lora is not None:
        adapters = (".lora_a.weight", ".lora_b.weight")
        return {n: replace(f, frozen=not n.endswith(adapters)) for n, f in table.items()}
    return table


def _adapters(
    model: ModelShape, own: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, WeightFacts]]:
    if model.lora is None:
        return
    rank = model.lora.rank
    # Layers that read the same input come together: first what reads it, then what writes.
    for part, names in (
        ("attention", ("q_down", "kv_down")),
        ("attention", ("q_up",)),
        ("attention", ("kv_up",)),
        ("attention", ("q", "k", "v")),
        ("attention", ("o",)),
        ("mlp", ("gate", "up")),
        ("mlp", ("down",)),
    ):
        here = [f"{part}.{one}" for one in model.lora.targets if one in names]
        layers = [one for one in here if f"{one}.weight" in own]
        for one in layers:
            inner = own[f"{one}.weight"][1]
            bound = 1 / math.sqrt(inner)
            fact = WeightFacts(shape=(rank, inner), bound=bound, in_block=True)
            yield f"{one}.lora_a.weight", fact
        for one in layers:
            out = own[f"{one}.weight"][0]
            yield f"{one}.lora_b.weight", WeightFacts(shape=(out, rank), in_block=True)


def first_values(model: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """Return the first value of every weight, float32."""
    values: dict[str, torch.Tensor] = {}
    for name, fact in weights_of(model).items():
        if fact.bound is not None:
            drawn = uniforms(key_of("parameter", seed, name), 0, math.prod(fact.shape))
            within = torch.from_numpy((2 * drawn - 1) * fact.bound)
            values[name] = within.to(torch.float32).reshape(fact.shape)
        elif fact.std is None:
            drawn = uniforms(key_of("parameter", seed, name), 0, math.prod(fact.shape))
            around = torch.from_numpy(fact.constant + (2 * drawn - 1) * model.initial_spread)
            values[name] = around.to(torch.float32).reshape(fact.shape)
        else:
            drawn = normals(key_of("parameter", seed, name), math.prod(fact.shape))
            values[name] = (drawn * fact.std).to(torch.float32).reshape(fact.shape)
    return values


def has_experts(model: ModelShape, block: int) -> bool:
    """Return whether a block has routed experts: all have, but for the first dense ones."""
    return model.experts is not None and block >= model.experts.first_dense_layers


def _fact(model: ModelShape, name: str, shape: tuple[int, ...]) -> WeightFacts:
    """Return the facts of a weight of a block."""
    if len(shape) == 1:
        ones = name.endswith("norm.weight")
        return WeightFacts(shape=shape, constant=1.0 if ones else 0.0, in_block=True)
    writes = name.endswith((".o.weight", ".down.weight"))
    std = model.initial_std / math.sqrt(2 * model.layers) if writes else model.initial_std
    return WeightFacts(shape=shape, std=std, in_block=True)


def _block(model: ModelShape, block: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = model.hidden
    norms: list[tuple[str, tuple[int, ...]]] = [("weight", (wide,))]
    norms += [("bias", (wide,))] * (model.norm == "layernorm")
    before, after = model.norm_place in ("before", "both"), model.norm_place in ("after", "both")
    if before:
        yield from ((f"attention_norm.{what}", shape) for what, shape in norms)
    yield from _attention(model) if model.latent is None else _latent(model, model.latent)
    if after:
        yield from ((f"attention_post_norm.{what}", shape) for what, shape in norms)
    if before and model.residual != "parallel-one-norm":
        yield from ((f"mlp_norm.{what}", shape) for what, shape in norms)
    yield from _feed_forward(model, block)
    if after:
        yield from ((f"mlp_post_norm.{what}", shape) for what, shape in norms)


def _feed_forward(model: ModelShape, block: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = model.hidden
    if model.experts is None or not has_experts(model, block):
        yield from _mlp(model, "mlp", model.ffn, bias=model.mlp_bias)
        return
    experts = model.experts
    yield "mlp.router.weight", (experts.num_experts, wide)
    if experts.logit_bias:
        yield "mlp.logit_bias.weight", (experts.num_experts,)
    for number in range(experts.num_experts):
        yield from _mlp(model, f"mlp.experts.{number}", experts.ffn, bias=experts.bias)
    if experts.shared_experts:
        width = experts.shared_experts * experts.ffn
        yield from _mlp(model, "mlp.shared", width, bias=model.mlp_bias)


def _linear(
    name: str, out: int, inner: int, *, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, inner)
    if bias:
        yield f"{name}.bias", (out,)


def _attention(model: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide, head = model.hidden, model.head_dim
    yield from _linear("attention.q", model.heads * head, wide, bias=model.qkv_bias)
    yield from _linear("attention.k", model.kv_heads * head, wide, bias=model.qkv_bias)
    yield from _linear("attention.v", model.kv_heads * head, wide, bias=model.qkv_bias)
    if model.qk_norm:
        times = (model.heads, model.kv_heads) if model.qk_norm_over == "width" else (1, 1)
        yield "attention.q_norm.weight", (times[0] * head,)
        yield "attention.k_norm.weight", (times[1] * head,)
    if model.sinks:
        yield "attention.sinks.weight", (model.heads,)
    yield from _linear("attention.o", wide, model.heads * head, bias=model.output_bias)


def _latent(model: ModelShape, latent: LatentAttention) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide, heads, rank = model.hidden, model.heads, latent.query_rank
    if rank is not None:
        yield "attention.q_norm.weight", (rank,)
    yield "attention.kv_norm.weight", (latent.kv_rank,)
    if rank is not None:
        yield "attention.q_down.weight", (rank, wide)
    yield "attention.q_up.weight", (heads * (latent.nope_dim + latent.rope_dim), rank or wide)
    yield "attention.kv_down.weight", (latent.kv_rank + latent.rope_dim, wide)
    yield "attention.kv_up.weight", (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield "attention.o.weight", (wide, heads * latent.value_dim)


def _mlp(
    model: ModelShape, name: str, ffn: int, *, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = model.hidden
    if model.gated:
        yield from _linear(f"{name}.gate", ffn, wide, bias=bias)
    yield from _linear(f"{name}.up", ffn, wide, bias=bias)
    yield from _linear(f"{name}.down", wide, ffn, bias=bias)


GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio."""

_WORD = 2**64 - 1  # the largest number of 64 bits
_LARGEST = 1.0 - 2.0**-53  # a uniform value


@overload
def mixed(bits: int) -> int: ...
@overload
def mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]: ...
def mixed(bits: Any) -> Any:
    """Return SplitMix64's finaliser of 64 bits, or of each number of an array."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _WORD
    return bits ^ (bits >> 31)


def key_of(*words: object) -> int:
    """Return the key that some words have."""
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def uniforms(key: int, first: int, count: int) -> NDArray[np.float64]:
    """Return the uniform values in (0, 1) at `count` indices from `first` on."""
    indices = np.arange(first, first + count, dtype=np.uint64)
    upper = mixed(indices * np.uint64(GOLDEN) + np.uint64(key)) >> np.uint64(11)
    return np.minimum((upper.astype(np.float64) + 0.5) / 2.0**53, _LARGEST)


def normals(key: int, count: int) -> torch.Tensor:
    """Return the first `count` standard normal values, float64."""
    return torch.special.ndtri(torch.from_numpy(uniforms(key, 0, count)))
