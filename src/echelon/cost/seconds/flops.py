# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a model: what "model FLOPs utilization" divides by.

Source: Chowdhery et al., PaLM (2022), appendix B. Every weight that a token is multiplied by costs
2 FLOPs forward and 4 backward; full attention costs 12 x layers x width x sequence more. Recompute
is not added. Published figures count full attention, of which a causal mask hides half: pages tell
both, and `causal` counts only the pairs that a causal model has. Of a sliding window only the keys
inside count: kernels skip the rest, and so far beyond a window a figure for the whole sequence
would say more than 100 %. Documents are data: not counted. Of routed experts only the k of a
token count, as in a dense model with the same number of active parameters.
"""

from __future__ import annotations

from math import prod

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import (
    EMBEDDING,
    num_active_parameters,
    num_parameters,
    num_trained_parameters,
    parameters,
)

EMBEDDING_TABLES = frozenset({EMBEDDING, "positions.weight"})
"""Tables that a token is looked up in: no multiplication, unless the head is tied to one."""


def model_flops_per_token(
    shape: ModelShape, sequence_length: int, *, all_experts: bool = False, causal: bool = False
) -> float:
    """Return the FLOPs of forward and backward per token of a sequence of `sequence_length`.

    `all_experts` routes each token to every expert; `causal` counts for a query of a causal model
    the keys up to its own position only.
    """
    multiplied = multiplied_weights(shape, all_experts=all_experts)
    whole = flops_of_weights(multiplied, shape, sequence_length, causal=causal)
    if shape.lora is None:
        return whole
    # A frozen weight has no gradient: 2 FLOPs forward, and 2 backward for its input's.
    return whole - 2.0 * (multiplied - num_trained_parameters(shape))


def multiplied_weights(shape: ModelShape, *, all_experts: bool = False) -> int:
    """Return the weights that a token is multiplied with."""
    looked_up = sum(prod(s.shape) for s in parameters(shape) if s.name in EMBEDDING_TABLES)
    head = shape.vocab * shape.hidden if shape.tied else 0
    met = num_parameters(shape) if all_experts else num_active_parameters(shape)
    return met - looked_up + head


def flops_of_weights(
    multiplied: int, shape: ModelShape, sequence_length: int, *, causal: bool = False
) -> float:
    """Return the FLOPs of a token that is multiplied with so many weights, attention included."""
    met = causal_positions if causal and shape.causal else attended_positions
    keys = sum(met(shape.of_layer(layer), sequence_length) for layer in range(shape.layers))
    return 6.0 * multiplied + 12.0 * attention_width(shape) * keys


def attended_positions(shape: ModelShape, sequence_length: int) -> int:
    """Return how many positions count for a query of a block with the window, if there is one."""
    if shape.window is None:
        return sequence_length
    return min(sequence_length, shape.window if shape.causal else 2 * shape.window - 1)


def causal_positions(shape: ModelShape, sequence_length: int) -> float:
    """Mean number of keys that a query of a causal block attends to, its own among them."""
    window = attended_positions(shape, sequence_length)
    return window - window * (window - 1) / (2 * sequence_length)


def attention_width(shape: ModelShape) -> float:
    """Return the width at which all heads together meet keys and values."""
    if shape.latent is None:
        return shape.query_dim
    # Queries meet keys at one width and weights meet values at another: the mean of the two.
    key_dim = shape.latent.nope_dim + shape.latent.rope_dim
    return shape.heads * (key_dim + shape.latent.value_dim) / 2
