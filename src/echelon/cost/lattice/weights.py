"""How many weights a block, an embedding and a head have, and a rank's part of them.

Matrices are cut by tensor parallelism, norms are not; latent attention leads down to vectors that
every tensor rank has whole (DeepSeek-V2, 2024, section 2.1). Routed experts are shared out over ep,
and cut over expert_tp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.cost.lattice.numbers import LayoutNumbers, ModelNumbers, Num


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """Give the weights of a block on one rank: those of routed experts apart."""

    shared: Num
    routed: Num


def block_weights(model: ModelNumbers, layout: LayoutNumbers, *, mixture: bool) -> BlockWeights:
    """Return the weights of a dense block, or of one with experts, on a tensor and expert rank."""
    hidden, tp = model.hidden, layout.tp
    latent = np.asarray(model.kv_rank) > 0
    plain = hidden * (model.query_dim + 2.0 * model.kv_dim) / tp
    width = np.where(latent, model.value_dim, model.query_dim)
    down = hidden * (model.query_rank + model.kv_rank)
    vectors = model.kv_rank - model.rope_dim
    into = np.where(np.asarray(model.query_rank) > 0, model.query_rank, hidden)
    up = (into * model.query_dim + vectors * model.kv_up_dim) / tp
    attention = np.where(latent, down + up, plain) + hidden * width / tp
    norms = 2.0 * hidden * model.norm_weights + model.head_norms + model.query_rank + vectors
    biases = model.qkv_bias * (model.query_dim + 2.0 * model.kv_dim) / tp
    biases = biases + model.output_bias * hidden
    matrices = 1.0 + model.up
    if mixture:
        each = matrices * hidden * model.expert_ffn
        inner = each * model.shared_experts / tp + hidden * model.experts
        routed = each * model.experts / (layout.ep * layout.expert_tp)
    else:
        inner = matrices * hidden * model.ffn / tp
        biases = biases + model.mlp_bias * (model.up * model.ffn / tp + hidden)
        routed = 0.0
    return BlockWeights(shared=attention + inner + norms + biases, routed=routed)


def embedding_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of the embedding, and of learned positions, on a tensor rank."""
    return model.hidden * (model.vocab / layout.tp + model.positions)


def head_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of the head and the last norm on a tensor rank; a tied one counts here."""
    return model.hidden * model.vocab / layout.tp + model.hidden * model.norm_weights


def both_ends(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of both ends where one rank holds them; a tied matrix is there once."""
    norm = model.hidden * model.norm_weights
    head = np.where(np.asarray(model.tied) > 0, norm, head_weights(model, layout))
    return embedding_weights(model, layout) + head
