"""Floating-point operations of a model: what "model FLOPs utilization" divides by.

Source: Chowdhery et al., PaLM (2022), appendix B. Every weight that a token is multiplied by costs
2 FLOPs forward and 4 backward; attention costs 12 x layers x width x sequence more. Recompute and
the causal half that is masked away are not credited, so that figures compare across systems.
"""

from __future__ import annotations

from math import prod

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, num_active_parameters, parameters

LOOKED_UP = frozenset({EMBEDDING, "positions.weight"})
"""Tables that a token is looked up in: no multiplication, unless the head is tied to one."""


def model_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Return the FLOPs of forward and backward per token of a sequence of `sequence_length`."""
    looked_up = sum(prod(s.shape) for s in parameters(shape) if s.name in LOOKED_UP)
    head = shape.vocab * shape.hidden if shape.tied else 0
    multiplied = num_active_parameters(shape) - looked_up + head
    return 6.0 * multiplied + 12.0 * shape.layers * attention_width(shape) * sequence_length


def attention_width(shape: ModelShape) -> float:
    """Return the width at which all heads together meet keys and values."""
    if shape.latent is None:
        return shape.query_dim
    # Queries meet keys at one width and weights meet values at another: the mean of the two.
    key_dim = shape.latent.nope_dim + shape.latent.rope_dim
    return shape.heads * (key_dim + shape.latent.value_dim) / 2
