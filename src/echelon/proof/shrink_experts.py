# SPDX-License-Identifier: Apache-2.0
"""The experts of a plan made small: fewer of them, and all that can go wrong with them.

Kept are the expert axis and what it folds over, several experts on a rank where there were several,
groups and how many of them a token may meet, how many experts it meets, shared experts, a dense
block first, the kind of router, every rule of the balance, drops, and how tokens travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import floor, lcm

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Plan

_SEVERAL = 2  # experts
_WITHOUT_RANKS = 4  # experts
_LEAST_AUX = 0.01  # coefficient of the auxiliary loss
_LEAST_Z = 1e-3  # coefficient of the z-loss
_LEAST_RATE = 0.02
"""A bias that moves by less sends no token of a small model elsewhere in three steps."""


def small_experts(plan: Plan, layers: int, width: Callable[[int], int]) -> Experts | None:
    """Return the mixture of a model of `layers` blocks; nothing of a dense one.

    `width` makes a width of an MLP small.
    """
    experts = plan.model.experts
    if experts is None:
        return None
    return replace(
        experts,
        num_experts=_num_experts(experts, plan.mesh.ep),
        ffn=width(experts.ffn),
        shared_experts=min(experts.shared_experts, _SEVERAL),
        first_dense_layers=min(experts.first_dense_layers, 1, layers - 1),
    )


def _num_experts(experts: Experts, ep: int) -> int:
    """Return the fewest experts among which all choices are left that there were."""
    groups, top_groups, top_k = experts.groups, experts.top_groups, experts.top_k
    per_rank, per_group = experts.num_experts // ep, experts.num_experts // groups
    within = top_groups * per_group > top_k
    fewest = min(experts.num_experts, _WITHOUT_RANKS)
    step = lcm(ep, groups)
    for number in count(step, step):
        size = number // groups
        choices = top_groups * size
        if (
            number >= fewest
            and number // ep >= min(per_rank, _SEVERAL)
            and size >= min(per_group, _SEVERAL)
            and choices >= top_k + within
        ):
            return number
    raise AssertionError("numbers end")


def small_latent(shape: ModelShape, tile: int = 1) -> LatentAttention | None:
    """Return narrow latent attention; its values stay narrower than keys, or as wide.

    Its widths are multiples of `tile`.
    """
    latent = shape.latent
    if latent is None:
        return None
    nope, rope = 4, 2
    widths = {latent.nope_dim: nope, latent.nope_dim + latent.rope_dim: nope + rope}
    between = nope - 1 if latent.value_dim < latent.nope_dim else nope + 1
    return LatentAttention(
        query_rank=None if latent.query_rank is None else 10 * tile,
        kv_rank=7 * tile,
        nope_dim=nope * tile,
        rope_dim=rope * tile,
        value_dim=widths.get(latent.value_dim, between) * tile,
    )


def small_balance(balance: Balance, experts: Experts | None, length: int) -> Balance:
    """Return the balance with coefficients that show, and room for some tokens only."""
    if experts is None:
        return balance
    factor = balance.capacity_factor
    if factor is not None:
        mean = length * experts.top_k / experts.num_experts
        factor = min(factor, max(1, floor(mean)) / mean)
    return replace(
        balance,
        aux_coefficient=max(balance.aux_coefficient, _LEAST_AUX),
        z_coefficient=max(balance.z_coefficient, _LEAST_Z) if balance.z_coefficient else 0.0,
        bias_rate=max(balance.bias_rate, _LEAST_RATE),
        capacity_factor=factor,
    )


def elements_of_a_rank(plan: Plan, model: ModelShape) -> int:
    """Return about how many elements of `model` one rank of `plan` computes with."""
    mesh, pieces = plan.mesh, plan.layout.experts.expert_tp
    total = sum(
        spec.numel // (mesh.tp if spec.expert is None else mesh.ep * pieces)
        for spec in parameters(model)
    )
    return total // mesh.pp
