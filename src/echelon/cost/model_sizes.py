"""Sizes and rates in closed form, without a plan: what calculators and published claims rest on.

A plan's own figures are elsewhere: weights in `core/parameters.py`, bytes sent in
`cost/bytes_sent.py`. b sequences of s positions, D the hidden width, L blocks, n ranks.
"""

from __future__ import annotations

from math import ceil

TENSOR_SUMS = 2
"""Sums over tensor ranks in a forward pass of a block: behind attention and behind the MLP
(Shoeybi et al., 2019, section 3)."""

TRIPS = 2
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
    return TENSOR_SUMS * layers * sequences * positions * hidden * size


def expert_message_bytes(
    tokens: int, hidden: int, top_k: int, degree: int, *, size: int = 2
) -> float:
    """Return the bytes that leave a rank in a forward pass of a block: 2 b s D k (n-1)/n `size`.

    Loads are balanced, so 1/n of the rows stay where they are.
    """
    return TRIPS * tokens * hidden * top_k * size * (degree - 1) / degree


def num_buckets(num_bytes: float, bucket_bytes: int) -> int:
    """Return how many buckets gradients fill."""
    return ceil(num_bytes / bucket_bytes)


def ring_steps(degree: int) -> int:
    """Return the steps of a ring all-reduce: n - 1 to add up, n - 1 to hand around."""
    return 2 * (degree - 1)


def achieved_flops(num_devices: int, peak_flops: float, utilization: float) -> float:
    """Return the FLOP/s of a job at a model FLOPs utilization (Chowdhery et al., 2022, app. B)."""
    return num_devices * peak_flops * utilization


def model_flops_utilization(
    tokens_per_s: float, flops_per_token: float, num_devices: int, peak_flops: float
) -> float:
    """Return model FLOPs of a second over the peak of all devices (Chowdhery et al., 2022)."""
    return tokens_per_s * flops_per_token / (num_devices * peak_flops)
