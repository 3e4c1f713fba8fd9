# SPDX-License-Identifier: Apache-2.0
"""Which experts a token meets, and with which weight: the router's formulas, whatever the layout.

All of them look at one token at a time, but for the loads and the room of an expert, so that a
token goes to the same experts wherever it is computed. An expert has room for so many tokens of
each sequence; sequences are the same under every layout, and so are their tokens' places and
scores: what is dropped does not depend on how they are cut. Logits come in at least float32. Of
scores that are equal to the last bit, `topk` decides, row by row.

Shape suffixes: N tokens, E experts, K experts of a token (top_k), G groups of experts.
"""

from __future__ import annotations

import torch

from echelon.core.experts import Balance, DropRule
from echelon.core.model_shape import Experts

SMALLEST_SUM = 1e-20
"""Added to a sum of sigmoid scores before it divides: all of them may be 0."""


def scores_of(logits_NE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the scores of a router: a softmax over all experts, or a sigmoid of each."""
    return logits_NE.softmax(-1) if experts.router == "softmax" else logits_NE.sigmoid()


def probabilities(scores_NE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return scores that add up to 1 (DeepSeek-V3, 2024, equation 19)."""
    if experts.router == "softmax":
        return scores_NE
    return scores_NE / (scores_NE.sum(-1, keepdim=True) + SMALLEST_SUM)


@torch.no_grad()
def choose_experts(
    scores_NE: torch.Tensor,
    bias_E: torch.Tensor | None,
    token_N: torch.Tensor,
    experts: Experts,
    balance: Balance,
) -> torch.Tensor:
    """Return the experts of each token, int64 [N, K].

    They are those of the highest scores; the bias takes part in this choice only. `token_N` are
    the global numbers of the tokens, by which `balance.route` sends them elsewhere.
    """
    count, k = experts.num_experts, experts.top_k
    places_K = torch.arange(k, device=scores_NE.device)
    if balance.route == "even":
        return (token_N[:, None] * k + places_K) % count
    if balance.route == "one":
        return places_K.expand(len(token_N), k).contiguous()
    wanted_NE = scores_NE if bias_E is None else scores_NE + bias_E.to(scores_NE.dtype)
    if balance.route == "not-last" and count > k:
        wanted_NE = wanted_NE.clone()
        wanted_NE[:, -1] = -torch.inf
    if experts.groups > 1:
        wanted_NE = _within_best_groups(wanted_NE, experts)
    return wanted_NE.topk(k, dim=-1).indices


def gates_of(scores_NE: torch.Tensor, chosen_NK: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the weights of a token's experts, [N, K]; the gradient goes through the scores."""
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if experts.renormalise:
        gates_NK = gates_NK / (gates_NK.sum(-1, keepdim=True) + SMALLEST_SUM)
    return gates_NK * experts.gate_scale


def counts_of(chosen_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how many tokens chose each expert, int64 [E]; no host waits for it."""
    chosen = chosen_NK.reshape(-1)
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def _within_best_groups(wanted_NE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the scores with those outside of the best groups at minus infinity."""
    wanted_NGE = wanted_NE.unflatten(-1, (experts.groups, -1))
    count = 1 if experts.group_score == "max" else min(2, wanted_NGE.shape[-1])
    best_NG = wanted_NGE.topk(count, dim=-1).values.sum(-1)
    kept = best_NG.topk(experts.top_groups, dim=-1).indices
    outside_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter(-1, kept, False)
    return wanted_NGE.masked_fill(outside_NG[..., None], -torch.inf).flatten(-2)


@torch.no_grad()
def kept_assignments(
    chosen_NK: torch.Tensor,
    gates_NK: torch.Tensor,
    sequence_N: torch.Tensor,
    *,
    num_experts: int,
    capacity: int,
    drop: DropRule,
) -> torch.Tensor:
    """Return which assignments are kept, bool [N, K]: of each sequence and expert the first ones.

    Tokens of a sequence are given in the order of their positions. The first are the earliest
    ("position"), or those with the highest gates, of equal ones the earlier ("score").
    """
    place = sequence_N[:, None] * num_experts + chosen_NK
    order = torch.arange(place.numel(), device=place.device)
    if drop == "score":
        order = torch.sort(gates_NK.reshape(-1), descending=True, stable=True).indices
    # Assignments to one expert of one sequence side by side, each run in the order of preference.
    by_place = torch.sort(place.reshape(-1)[order], stable=True)
    order, sorted_place = order[by_place.indices], by_place.values
    index = torch.arange(len(order), device=place.device)
    starts = torch.ones_like(index, dtype=torch.bool)
    starts[1:] = sorted_place[1:] != sorted_place[:-1]
    first = torch.where(starts, index, 0).cummax(0).values
    result = torch.empty_like(index, dtype=torch.bool)
    result[order] = index - first < capacity
    return result.view_as(place)
