"""Where tokens go: how many rows a rank sends to the experts of others, and gets for its own.

N tokens are a microbatch on a rank of context, n the degree `ep`, E the experts, k those of a
token. A rank dispatches m rows: N / tp where experts are whole, for tensor ranks share out the
tokens; N where they are in pieces, for every piece needs every row. Of the m k assignments that are
not dropped, S leave for experts on other ranks, and R come from others.

S and R are data. With a record (`ExpertLoad`) they are exact. Without one they are balanced:
S = R = (n-1)/n m k, less what a capacity can not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.stage import RankPart, StagePart
from echelon.schedule.of_plan import placement_of

Choices = NDArray[np.int64]
"""The experts of each row, [m, k]; negative where one had no room."""

Crossing = tuple[int, int]
"""One microbatch in one block: (layer, microbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoad:
    """Record which experts the rows of each member of one expert group go to, in one step.

    `choices[layer, microbatch][i]` are those of the rows that member `i` dispatches, in order.
    """

    num_experts: int
    choices: Mapping[Crossing, tuple[Choices, ...]]

    def counts(self, crossing: Crossing) -> NDArray[np.int64]:
        """Return how many rows of each member go to each expert, [n, E]."""
        return np.stack(
            [
                np.bincount(rows[rows >= 0].ravel(), minlength=self.num_experts)
                for rows in self.choices[crossing]
            ]
        )

    def rows(self, crossing: Crossing, place: int) -> Rows:
        """Return what member `place` sends to others, and gets from them."""
        counts = self.counts(crossing)
        by_rank = counts.reshape(len(counts), len(counts), -1).sum(-1)
        here = by_rank[place, place]
        return Rows(
            leaving=int(by_rank[place].sum() - here), arriving=int(by_rank[:, place].sum() - here)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Say how many rows leave a rank for experts elsewhere (S), and arrive from elsewhere (R)."""

    leaving: int
    arriving: int


def dispatched_tokens(plan: Plan) -> int:
    """Return m: the rows of a microbatch that one rank dispatches."""
    return plan.local_tokens // (plan.mesh.tp if plan.layout.experts.expert_tp == 1 else 1)


def balanced_rows(plan: Plan) -> Rows:
    """Return the rows of a rank if each sends to each other the same number; rounded up."""
    rows = -(-kept_assignments(plan) * (plan.mesh.ep - 1) // plan.mesh.ep)
    return Rows(leaving=rows, arriving=rows)


def kept_assignments(plan: Plan) -> int:
    """Return the most assignments of a rank's rows that experts have room for, evenly spread."""
    experts = plan.model.experts
    assert experts is not None, "a dense model sends nothing to experts"
    length = plan.mathematics.sequence_length
    each = dispatched_tokens(plan) * experts.top_k
    room = plan.mathematics.balance.capacity(length, experts.num_experts, experts.top_k)
    if room is None:
        return each
    return min(each, -(-each * room * experts.num_experts // (length * experts.top_k)))


def expert_blocks(plan: Plan, stage: StagePart) -> tuple[int, ...]:
    """Return the blocks of a stage that are mixtures of experts."""
    return tuple(block for block in stage.blocks if plan.model.layer_has_experts(block))


def crossings(plan: Plan, part: RankPart) -> Iterator[Crossing]:
    """Yield each microbatch in each block with experts of a pipeline rank."""
    placement = placement_of(plan)
    for stage in part.stages:
        for microbatch in range(plan.num_microbatches):
            if placement.rank_of(stage.stage, microbatch) == part.pp_rank:
                for block in expert_blocks(plan, stage):
                    yield block, microbatch


def load_of(plan: Plan, rank: int, chosen: Mapping[int, NDArray[np.int64]]) -> ExpertLoad:
    """Return the load of the expert group of `rank`, of how a global batch was routed.

    `chosen[layer]` is [sequences, positions, k]: the experts of each token, negative where dropped.
    """
    experts, expert_tp = plan.model.experts, plan.layout.experts.expert_tp
    assert experts is not None, "a dense model routes nothing"
    groups = plan.mesh.expert_groups(expert_tp=expert_tp)
    group = next(ranks for ranks in groups if rank in ranks)
    return ExpertLoad(
        num_experts=experts.num_experts,
        choices={
            (layer, microbatch): tuple(
                _rows_of(plan, member, microbatch, chosen_BTK) for member in group
            )
            for layer, chosen_BTK in chosen.items()
            for microbatch in range(plan.num_microbatches)
        },
    )


def _rows_of(plan: Plan, rank: int, microbatch: int, chosen_BTK: NDArray[np.int64]) -> Choices:
    """Return the choices of the rows that a rank dispatches: token (t, b) is row t x B + b."""
    here, size = plan.mesh.coordinates(rank), plan.layout.microbatch_sequences
    data_rank = here[Axis.DP_REPLICATE] * plan.mesh.dp_shard + here[Axis.DP_SHARD]
    start = (data_rank * plan.num_microbatches + microbatch) * size
    positions = plan.placement.positions(here[Axis.CP])
    rows_BTK = chosen_BTK[start : start + size][:, positions]
    rows_NK = rows_BTK.swapaxes(0, 1).reshape(-1, chosen_BTK.shape[-1])
    if plan.layout.experts.expert_tp > 1:
        return rows_NK
    count = dispatched_tokens(plan)
    return rows_NK[here[Axis.TP] * count : (here[Axis.TP] + 1) * count]
