# SPDX-License-Identifier: Apache-2.0
"""Experts of one sequence, and what keeps them busy, token by token from the formulas.

Shazeer et al., 2017, and Jiang et al., "Mixtral", 2024, for gates; DeepSeek-V3, 2024, section
2.1.2, for sigmoid scores, groups, shared experts and the bias; Fedus et al., "Switch Transformer",
2021, equations 4 to 6, for the auxiliary loss and the capacity; Zoph et al., "ST-MoE", 2022,
equation 5, for the z-loss.

"gpt-oss-120b & gpt-oss-20b Model Card", OpenAI, 2025, and its reference code, for biases of experts
and of logits, and the clamped SwiGLU.

Shape suffixes: T positions, D hidden, E experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts, ModelShape
from echelon.proof.independent.sequence import SequenceRoutes, SequenceRun

SCORES = "router scores"
CHOICE = "choice of experts"
GATES = "gates"
CAPACITY = "capacity of experts"
EXPERTS = "experts"

_NO_ZERO_DIVISION = 1e-20  # added to a sum of sigmoid scores before it divides


def route(run: SequenceRun, x_TD: torch.Tensor, experts: Experts) -> SequenceRoutes:
    """Return where the tokens of a sequence go, and with which gates."""
    block = int(run.unit.partition(".")[2])
    logits_TE = x_TD @ run.weight("mlp.router.weight").T
    if experts.logit_bias:
        logits_TE = logits_TE + run.weight("mlp.logit_bias.weight")
    scores_TE = logits_TE.softmax(-1) if experts.router == "softmax" else logits_TE.sigmoid()
    run.note(SCORES, scores_TE)
    bias = run.biases[block].tolist() if block in run.biases else [0.0] * experts.num_experts
    chosen = [
        _choice(run, [s + b for s, b in zip(row, bias, strict=True)], t, experts)
        for t, row in enumerate(scores_TE.detach().tolist())
    ]
    gates: list[torch.Tensor] = []
    for row, picked in zip(scores_TE, chosen, strict=True):
        gate_K = row[picked]
        if experts.renormalise:
            gate_K = gate_K / (gate_K.sum() + _NO_ZERO_DIVISION)
        gates.append(gate_K * experts.gate_scale)
    gates_TK = torch.stack(gates)
    kept = _with_room(chosen, gates_TK.detach().tolist(), experts, run.balance)
    run.note(CHOICE, torch.tensor(chosen))
    run.note(GATES, gates_TK)
    run.note(CAPACITY, torch.tensor(kept))
    return SequenceRoutes(
        logits_TE=logits_TE, scores_TE=scores_TE, chosen=chosen, gates_TK=gates_TK, kept=kept
    )


def mix(run: SequenceRun, x_TD: torch.Tensor, routes: SequenceRoutes) -> torch.Tensor:
    """Return the sum of gate x SwiGLU expert over the experts of each token that have room."""
    experts = run.model.experts
    assert experts is not None, "only a block with experts mixes"
    y_TD = torch.zeros_like(x_TD)
    for expert in range(experts.num_experts):
        slots = [
            (t, k)
            for t, picked in enumerate(routes.chosen)
            for k, one in enumerate(picked)
            if one == expert and routes.kept[t][k]
        ]
        rows, places = [t for t, _ in slots], [k for _, k in slots]
        gates = routes.gates_TK[rows, places]
        name, x = f"mlp.experts.{expert}", x_TD[rows]
        if run.fp8 is not None:
            # What is rounded for the last product is weighted already.
            out = run.linear(_inner(run, x, name, experts) * gates[:, None], f"{name}.down")
        else:
            out = run.linear(_inner(run, x, name, experts), f"{name}.down") * gates[:, None]
        y_TD = y_TD.index_add(0, torch.tensor(rows, dtype=torch.int64), out)
    return y_TD


def _inner(run: SequenceRun, x: torch.Tensor, name: str, experts: Experts) -> torch.Tensor:
    """Return silu(gate(x)) x up(x) (Shazeer, "GLU Variants Improve Transformer", 2020).

    With a limit l, min(gate, l) x sigmoid(alpha min(gate, l)) x (up within [-l, l], and 1).
    """
    gate, up = run.linear(x, f"{name}.gate"), run.linear(x, f"{name}.up")
    if experts.limit is None:
        return gate * torch.sigmoid(gate) * up
    gate = torch.where(gate > experts.limit, experts.limit, gate)
    up = torch.where(up > experts.limit, experts.limit, up)
    up = torch.where(up < -experts.limit, -experts.limit, up)
    return gate * torch.sigmoid(experts.alpha * gate) * (up + 1)


def _choice(run: SequenceRun, wanted: list[float], position: int, experts: Experts) -> list[int]:
    """Return the experts of a token, those with the largest of `wanted` first."""
    count, k, rule = experts.num_experts, experts.top_k, run.balance.route
    if rule == "even":
        number = run.sample * len(run.tokens) + position
        return [(number * k + place) % count for place in range(k)]
    if rule == "one":
        return list(range(k))
    allowed = list(range(count))
    if experts.groups > 1:
        size = count // experts.groups
        groups = [allowed[first : first + size] for first in range(0, count, size)]
        if rule == "not-last" and count > k:
            wanted = [*wanted[:-1], -math.inf]
        terms = 1 if experts.group_score == "max" else 2
        value = [sum(sorted((wanted[e] for e in one), reverse=True)[:terms]) for one in groups]
        best = sorted(range(experts.groups), key=lambda g: value[g], reverse=True)
        allowed = [e for g in sorted(best[: experts.top_groups]) for e in groups[g]]
    elif rule == "not-last" and count > k:
        allowed = allowed[:-1]
    return sorted(allowed, key=lambda e: wanted[e], reverse=True)[:k]


def _with_room(
    chosen: list[list[int]], gates: list[list[float]], experts: Experts, balance: Balance
) -> list[list[bool]]:
    """Return which assignments have room: each expert has ceil(c T k / E) places in a sequence."""
    kept = [[True] * len(row) for row in chosen]
    if balance.capacity_factor is None:
        return kept
    # Rounded as `Balance` documents it: the last bit of a factor is not to make a place more.
    mean = len(chosen) * experts.top_k / experts.num_experts
    room = math.ceil(round(balance.capacity_factor * mean, 9))
    for expert in range(experts.num_experts):
        slots = [(t, k) for t, row in enumerate(chosen) for k, e in enumerate(row) if e == expert]
        if balance.drop == "score":
            slots.sort(key=lambda slot: -gates[slot[0]][slot[1]])
        for t, k in slots[room:]:
            kept[t][k] = False
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """Hold what routers know of the steps before, by block: biases, and shares of the loads."""

    biases: Mapping[int, torch.Tensor]
    shares: Mapping[int, list[float]]


def first_state(model: ModelShape, blocks: Sequence[int]) -> RouterState:
    """Return the state before the first step: no bias, the same share for each expert."""
    experts = model.experts
    if experts is None:
        return RouterState(biases={}, shares={})
    zero = torch.zeros(experts.num_experts, dtype=torch.float64)
    return RouterState(
        biases={block: zero for block in blocks if experts.router_bias},
        shares={block: [1 / experts.num_experts] * experts.num_experts for block in blocks},
    )


def loads_of(routes: Sequence[SequenceRoutes], num_experts: int) -> list[int]:
    """Return how many tokens chose each expert, before drops."""
    found = Counter(e for one in routes for row in one.chosen for e in row)
    return [found[expert] for expert in range(num_experts)]


def next_state(
    state: RouterState, routed: Mapping[int, Sequence[SequenceRoutes]], balance: Balance
) -> RouterState:
    """Return the state after a step: a bias rises below the mean load, and falls above it."""
    biases, shares = dict(state.biases), dict(state.shares)
    for block, routes in routed.items():
        loads = loads_of(routes, len(shares[block]))
        mean = sum(loads) / len(loads)
        shares[block] = [load / sum(loads) for load in loads]
        if balance.kind in ("bias", "both"):
            moves = [balance.bias_rate * ((load < mean) - (load > mean)) for load in loads]
            biases[block] = biases[block] + torch.tensor(moves, dtype=torch.float64)
    return RouterState(biases=biases, shares=shares)


def auxiliary_loss(
    routes: Sequence[SequenceRoutes], experts: Experts, balance: Balance, shares: list[float]
) -> torch.Tensor:
    """Return the mean over these sequences of coefficient x E x sum of f P.

    f is the part of the assignments that an expert gets: that of `shares`; P the mean probability
    of a token.
    """
    share = torch.tensor(shares, dtype=torch.float64)
    means: list[torch.Tensor] = []
    for one in routes:
        p_TE = one.scores_TE
        if experts.router == "sigmoid":
            p_TE = p_TE / (p_TE.sum(-1, keepdim=True) + _NO_ZERO_DIVISION)
        means.append((p_TE.mean(0) * share).sum())
    return balance.aux_coefficient * experts.num_experts * torch.stack(means).mean()


def z_loss(routes: Sequence[SequenceRoutes], balance: Balance) -> torch.Tensor:
    """Return coefficient x the mean of (log of the sum of exp of the logits) squared."""
    squares = [torch.logsumexp(one.logits_TE, dim=-1) ** 2 for one in routes]
    return balance.z_coefficient * torch.cat(squares).mean()


def router_losses(
    routed: Mapping[int, Sequence[SequenceRoutes]],
    experts: Experts,
    balance: Balance,
    state: RouterState,
    microbatch: int,
) -> tuple[torch.Tensor, dict[int, tuple[float, float]]]:
    """Return the sum to be differentiated, and what is told of each block: (auxiliary, z-loss)."""
    total, told = torch.zeros((), dtype=torch.float64), dict[int, tuple[float, float]]()
    for block, routes in routed.items():
        auxiliary, own = torch.zeros((), dtype=torch.float64), 0.0
        if balance.kind in ("aux", "both"):
            sizes = {"global": len(routes), "sequence": 1, "microbatch": microbatch}
            size = sizes[balance.aux_over]
            groups = [routes[first : first + size] for first in range(0, len(routes), size)]
            for group in groups:
                loads = loads_of(group, experts.num_experts)
                now = [load / sum(loads) for load in loads]
                before = state.shares[block] if balance.aux_over == "global" else now
                auxiliary = auxiliary + auxiliary_loss(group, experts, balance, before)
                own += float(auxiliary_loss(group, experts, balance, now).detach())
            auxiliary, own = auxiliary / len(groups), own / len(groups)
        z = z_loss(routes, balance)
        total = total + auxiliary + z
        told[block] = own, float(z.detach())
    return total, told
