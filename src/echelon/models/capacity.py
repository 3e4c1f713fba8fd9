"""The room of an expert: which assignments are kept where more come than it has room for.

An expert has room for so many tokens of each sequence. Sequences are the same under every layout,
and so are their tokens' places and scores: what is dropped does not depend on how they are cut.

Shape suffixes: N tokens of whole sequences, K experts of a token.
"""

from __future__ import annotations

import torch

from echelon.core.experts import DropRule


@torch.no_grad()
def kept(
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
