# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates in closed form, without a plan: what calculators and published claims rest on.

A plan's own figures are elsewhere: weights in `core/parameters.py`, bytes sent in
`cost/bytes/sent.py`. b sequences of s positions, D the hidden width, L blocks, n ranks.

What training keeps of keys and values are activations for backward (with recompute, those of one
block at a time); what generation keeps is the cache. Their bytes are the same formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, cos, exp, log, sin

import numpy as np

from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.group_links import (
    data_group_links,
)
from echelon.cost.inputs.numbers import LayoutNumbers, ModelNumbers, Num

ALL_REDUCES_PER_PASS = 2
"""Sums over tensor ranks in a forward pass of a block: behind attention and behind the MLP
(Shoeybi et al., 2019, section 3)."""

DISPATCH_AND_COMBINE = 2
"""Ways of a token in a forward pass: to its experts and back (Lepikhin et al., GShard, 2021)."""


def mlp_weights(hidden: int, ffn: int, matrices: int = 2) -> int:
    """Return the weights of an MLP without biases: D F for each of 2 matrices, 3 if gated."""
    return matrices * hidden * ffn


def tensor_message_bytes(
    layers: int, sequences: int, positions: int, hidden: int, *, size: int = 2
) -> int:
    """Return the bytes that all forward sums over tensor ranks add up: 2 L b s D times `size`.

    That is what the messages hold. A rank sends 2 (n-1)/n of it, and as much again in backward.
    """
    return ALL_REDUCES_PER_PASS * layers * sequences * positions * hidden * size


def expert_message_bytes(
    tokens: int, hidden: int, top_k: int, degree: int, *, size: int = 2
) -> float:
    """Return the bytes that leave a rank in a forward pass of a block: 2 b s D k (n-1)/n `size`.

    Loads are balanced, so 1/n of the rows stay where they are.
    """
    return DISPATCH_AND_COMBINE * tokens * hidden * top_k * size * (degree - 1) / degree


def num_buckets(num_bytes: float, bucket_bytes: int) -> int:
    """Return how many buckets gradients fill."""
    return ceil(num_bytes / bucket_bytes)


def ring_steps(degree: int) -> int:
    """Return the steps of a ring all-reduce: n - 1 to add up, n - 1 to hand around."""
    return 2 * (degree - 1)


def achieved_flops(num_devices: int, peak_flops: float, utilization: float) -> float:
    """Return the FLOP/s of a job at a model FLOPs utilization (Chowdhery et al., 2022, app. B)."""
    return num_devices * peak_flops * utilization


Vector = tuple[float, ...]


def kv_bytes(positions: int, kv_dim: int, layers: int, size: int = 2) -> int:
    """Return the bytes of keys and values of a sequence: 2 T K h L s.

    `kv_dim` is the width of all key heads together: grouped queries need kv_heads / heads of what
    as many key heads as query heads would.
    """
    return 2 * positions * kv_dim * layers * size


def attention_merge_errors(length: int = 16, ranks: int = 4) -> tuple[float, float, float]:
    """Return the largest error of the last rank's outputs of causal attention, by three ways.

    Each rank has a chunk of a small example. Against attention on one device: where a rank has its
    own keys only; where it meets all chunks and adds up their outputs with equal weights; where it
    merges them by their log-sum-exp.
    """
    angles = [0.7 * i for i in range(length)]
    q: list[Vector] = [(3 * sin(a), 2 * cos(2 * a)) for a in angles]
    k: list[Vector] = [(2 * cos(3 * a), 3 * sin(a + 1)) for a in angles]
    v: list[float] = [sin(5 * a) for a in angles]
    size = length // ranks
    worst = [0.0, 0.0, 0.0]
    for row in range(length - size, length):
        parts = [
            _attend(q[row], k[first : min(first + size, row + 1)], v[first:])
            for first in range(0, row + 1, size)
        ]
        whole, _ = _attend(q[row], k[: row + 1], v)
        total = log(sum(exp(lse) for _, lse in parts))
        ways = (
            parts[-1][0],
            sum(out for out, _ in parts) / len(parts),
            sum(out * exp(lse - total) for out, lse in parts),
        )
        worst = [max(old, abs(way - whole)) for old, way in zip(worst, ways, strict=True)]
    return worst[0], worst[1], worst[2]


def _attend(q: Vector, keys: Sequence[Vector], values: Sequence[float]) -> tuple[float, float]:
    """Return the output and the log-sum-exp of one query over some keys."""
    scores = [sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    lse = log(sum(exp(score) for score in scores))
    return sum(exp(s - lse) * value for s, value in zip(scores, values, strict=False)), lse


def block_weights(model: ModelNumbers, layout: LayoutNumbers, *, mixture: bool) -> tuple[Num, Num]:
    """Return the weights of a block on a tensor and expert rank, those of routed experts apart."""
    hidden, tp = model.hidden, layout.tp
    latent = np.asarray(model.kv_rank) > 0
    plain = hidden * (model.query_dim + 2.0 * model.kv_dim) / tp
    width = np.where(latent, model.value_dim, model.query_dim)
    down = hidden * (model.query_rank + model.kv_rank)
    vectors = model.kv_rank - model.rope_dim
    into = np.where(np.asarray(model.query_rank) > 0, model.query_rank, hidden)
    up = (into * model.query_dim + vectors * model.kv_up_dim) / tp
    attention = np.where(latent, down + up, plain) + hidden * width / tp
    norms = (
        model.block_norms * hidden * model.norm_weights
        + model.head_norms
        + model.width_norms / tp
        + model.query_rank
        + vectors
    )
    biases = model.qkv_bias * (model.query_dim + 2.0 * model.kv_dim) / tp
    biases = biases + model.output_bias * hidden
    matrices = 1.0 + model.up
    if mixture:
        each = matrices * hidden * model.expert_ffn
        inner = each * model.shared_experts / tp + hidden * model.experts
        # Of an expert in pieces each has all of the bias of the output.
        vectors = model.expert_bias * (model.up * model.expert_ffn + hidden * layout.expert_tp)
        routed = (each + vectors) * model.experts / (layout.ep * layout.expert_tp)
        biases = biases + model.logit_bias * model.experts
    else:
        inner = matrices * hidden * model.ffn / tp
        biases = biases + model.mlp_bias * (model.up * model.ffn / tp + hidden)
        routed = 0.0
    adapters = model.adapters_whole + model.adapters_split / tp
    return attention + inner + norms + biases + adapters, routed


def embedding_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of the embedding, and of learned positions, on a tensor rank."""
    return model.hidden * (model.vocab / layout.tp + model.positions)


def head_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of the head and the last norm on a tensor rank; a tied one counts here."""
    return model.hidden * model.vocab / layout.tp + model.hidden * model.norm_weights


def embedding_and_head_weights(model: ModelNumbers, layout: LayoutNumbers) -> Num:
    """Return the weights of both ends where one rank holds them; a tied matrix is there once."""
    norm = model.hidden * model.norm_weights
    head = np.where(np.asarray(model.tied) > 0, norm, head_weights(model, layout))
    return embedding_weights(model, layout) + head


def node_slice_weights(work: CostInputs, shared: Num, routed: Num) -> Num:
    """Return how many weights a rank keeps for its node of so many, and of routed experts."""
    layout = work.layout
    if not np.any(np.asarray(layout.secondary) > 0.0):
        return 0.0
    ways, found = data_group_links(work), 0.0
    for way, weights in ((ways.shared, shared), (ways.routed, routed)):
        local = np.asarray(way.ranks_per_node)
        keeps = (local > 1.0) & (local < way.degree)
        found = found + np.where(keeps, weights / np.maximum(local, 1.0), 0.0)
    return np.where(np.asarray(layout.secondary) > 0.0, found, 0.0)
