# SPDX-License-Identifier: Apache-2.0
"""Where tokens go: how many rows a rank sends to the experts of others, and gets for its own.

N tokens are a microbatch on a rank of context, n the degree `ep`, E the experts, k those of a
token. A rank dispatches m rows: N / tp where experts are whole, for tensor ranks share out the
tokens; N where they are in pieces, for every piece needs every row. Of the m k assignments that are
not dropped, S leave for experts on other ranks, and R come from others.

S and R are data. With a record (`ExpertLoad`) they are exact. Without one they are balanced: every
rank sends every other the same number, S = R = (n-1)/n m k, less what a capacity can not hold; and
of the nodes that a token reaches (two hops) it is what it would be if all choices were as likely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, comb

import numpy as np
from numpy.typing import NDArray

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.layout.stage import RankPart, StagePart
from echelon.schedule.from_plan import stage_placement_from_plan


def slots_per_expert(num_tokens: int, num_sequences: int, capacity: int) -> int:
    """Return the rows that one rank keeps for one expert out of `num_tokens` tokens of its own.

    Tokens of the sequences take turns, so that each sequence has as many of them, or one more; an
    expert has room for `capacity` tokens of a sequence.
    """
    each, longer = divmod(num_tokens, num_sequences)
    return longer * min(capacity, each + 1) + (num_sequences - longer) * min(capacity, each)


def experts_of(plan: Plan) -> Experts:
    """Return the experts of a plan whose model has any."""
    assert plan.model.experts is not None, "a dense model has no experts"
    return plan.model.experts


def expert_capacity(plan: Plan) -> int | None:
    """Return how many tokens of a sequence an expert has room for; None where there is no end."""
    experts, length = experts_of(plan), plan.mathematics.sequence_length
    return plan.mathematics.balance.capacity(length, experts.num_experts, experts.top_k)


def padded_slots(plan: Plan) -> int:
    """Return the rows that one rank keeps for one expert in a chunk, if sizes are known before."""
    room, tokens = expert_capacity(plan), dispatched_tokens(plan) // plan.layout.experts.chunks
    assert room is not None, "without a capacity there is no size to pad to"
    return slots_per_expert(tokens, plan.layout.microbatch_sequences, room)


ExpertChoices = NDArray[np.int64]
"""The experts of each row, [m, k]; negative where one had no room."""

BlockPass = tuple[int, int]
"""One microbatch in one block: (layer, microbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoad:
    """Record which experts the rows of each member of one expert group go to, in one step.

    `choices[layer, microbatch][i]` are those of the rows that member `i` dispatches, in order.
    """

    num_experts: int
    choices: Mapping[BlockPass, tuple[ExpertChoices, ...]]

    def counts(self, crossing: BlockPass) -> NDArray[np.int64]:
        """Return how many rows of each member go to each expert, [n, E]."""
        return np.stack(
            [
                np.bincount(rows[rows >= 0].ravel(), minlength=self.num_experts)
                for rows in self.choices[crossing]
            ]
        )

    def between(self, crossing: BlockPass) -> NDArray[np.int64]:
        """Return how many rows each member sends to each member, [n, n]."""
        counts = self.counts(crossing)
        return counts.reshape(len(counts), len(counts), -1).sum(-1)

    def rows(self, crossing: BlockPass, place: int) -> RowCounts:
        """Return what member `place` sends to others, and gets from them."""
        return _beside_own(self.between(crossing), place)

    def pairs(self, crossing: BlockPass, place: int, num_nodes: int) -> RowCounts:
        """Return how many pairs of a token and another node member `place` sends, and gets.

        The members of a node lie side by side; a token goes to the one with the same place on it.
        """
        size = len(self.choices[crossing]) // num_nodes
        node, member = divmod(place, size)
        reached = np.stack(
            [
                self.nodes_reached(rows, num_nodes).sum(0)
                for rows in self.choices[crossing][member::size]
            ]
        )
        return _beside_own(reached, node)

    def rows_within(self, crossing: BlockPass, place: int, num_nodes: int) -> RowCounts:
        """Return what member `place` sends to others of its node, and gets, in the second hop."""
        between = self.between(crossing)
        size = len(between) // num_nodes
        node, member = divmod(place, size)
        # Tokens of all members with the same place on their nodes are at one member of this node.
        here = between[:, node * size : (node + 1) * size].reshape(num_nodes, size, size).sum(0)
        return _beside_own(here, member)

    def nodes_reached(self, rows: ExpertChoices, num_nodes: int) -> NDArray[np.bool_]:
        """Return whether each row has an expert on each node, [m, nodes]."""
        nodes = np.where(rows >= 0, rows // (self.num_experts // num_nodes), -1)
        return (nodes[:, :, None] == np.arange(num_nodes)).any(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Say how many rows leave a rank for experts elsewhere (S), and arrive from elsewhere (R)."""

    leaving: int
    arriving: int


def dispatched_tokens(plan: Plan) -> int:
    """Return m: the rows of a microbatch that one rank dispatches."""
    return plan.local_tokens // (plan.mesh.tp if plan.layout.experts.expert_tp == 1 else 1)


def _beside_own(between: NDArray[np.int64], place: int) -> RowCounts:
    """Return what `place` sends and gets, of a square of senders and receivers."""
    own = between[place, place]
    return RowCounts(
        leaving=int(between[place].sum() - own), arriving=int(between[:, place].sum() - own)
    )


def balanced_rows(plan: Plan, degree: int) -> RowCounts:
    """Return the rows of a rank if each of `degree` sends to each as many.

    Rows of each chunk that are left over leave.
    """
    chunks = plan.layout.experts.chunks
    each = kept_assignments(plan) // chunks
    rows = chunks * (each - each // degree)
    return RowCounts(leaving=rows, arriving=rows)


def balanced_pairs(plan: Plan, num_nodes: int) -> RowCounts:
    """Return the pairs of a token and another node if each choice is as likely.

    They are rounded up in each chunk.
    """
    experts, chunks = experts_of(plan), plan.layout.experts.chunks
    tokens = Fraction(kept_assignments(plan) // chunks, experts.top_k)
    pairs = chunks * ceil(tokens * (num_nodes - 1) * (1 - _misses(experts, num_nodes)))
    return RowCounts(leaving=pairs, arriving=pairs)


def even_pairs(plan: Plan, num_nodes: int) -> int:
    """Return the pairs of a token and a node, its own too, if each choice is as likely."""
    if num_nodes == 1:
        return dispatched_tokens(plan)
    chunks = plan.layout.experts.chunks
    others = balanced_pairs(plan, num_nodes).leaving // chunks
    # Its own are rounded down: rows that are left over go to others (`balanced_rows`).
    return chunks * (others + others // (num_nodes - 1))


def _misses(experts: Experts, num_nodes: int) -> Fraction:
    """Return how likely none of the experts of a token is on a given node.

    Groups that no node has whole are left out of account.
    """
    groups, top_groups = experts.groups, experts.top_groups
    if groups % num_nodes:
        left = comb(experts.num_experts - experts.num_experts // num_nodes, experts.top_k)
        return Fraction(left, comb(experts.num_experts, experts.top_k))
    size, here, missed = experts.num_experts // groups, groups // num_nodes, Fraction(0)
    for number in range(min(here, top_groups) + 1):
        # So many of the groups that the token may choose from are on the node.
        ways = comb(here, number) * comb(groups - here, top_groups - number)
        left = comb((top_groups - number) * size, experts.top_k)
        missed += Fraction(ways * left, comb(top_groups * size, experts.top_k))
    return missed / comb(groups, top_groups)


def most_nodes(experts: Experts, num_nodes: int) -> int:
    """Return to how many nodes a token can go, its own counted: DeepSeek-V3 limits them by groups.

    Source: DeepSeek-V3, 2024, section 2.1.2 (node-limited routing).
    """
    nodes = min(num_nodes, experts.top_k)
    return nodes if experts.groups % num_nodes else min(nodes, experts.top_groups)


def num_nodes(plan: Plan) -> int:
    """Return over how many nodes an expert group is spread."""
    group = _first_group(plan.mesh, plan.layout.experts.expert_tp)
    return len({rank // plan.cluster.devices_per_node for rank in group})


@lru_cache(maxsize=64)
def _first_group(mesh: Mesh, expert_tp: int) -> tuple[int, ...]:
    """Return the first expert group: of thousands of ranks it takes long to find."""
    return mesh.expert_groups(expert_tp=expert_tp)[0]


def kept_assignments(plan: Plan) -> int:
    """Return the most assignments of a rank's rows that experts have room for, evenly spread."""
    experts, length = experts_of(plan), plan.mathematics.sequence_length
    each, room = dispatched_tokens(plan) * experts.top_k, expert_capacity(plan)
    if room is None:
        return each
    return min(each, -(-each * room * experts.num_experts // (length * experts.top_k)))


def counted_on_device(plan: Plan) -> bool:
    """Return whether a rank's device alone knows how many rows each expert has.

    So it is on GPUs, in bf16, for who has all experts, and those have no biases.
    """
    if experts_of(plan).bias:
        return False
    layout, precision = plan.layout.experts, plan.mathematics.precision
    alone = plan.mesh.ep == 1 and not layout.padded and layout.dispatch == "flat"
    return alone and plan.cluster.backend == "nccl" and precision.parameters == "bf16"


def rows_at_experts(plan: Plan) -> int:
    """Return how many assignments of a rank's rows are rows of experts, evenly spread.

    They are those that are kept; but where the device counts them, there is a row for each, the
    dropped ones behind the last expert, so that no size hangs on the routing.
    """
    if counted_on_device(plan):
        return dispatched_tokens(plan) * experts_of(plan).top_k
    return kept_assignments(plan)


def rows_per_expert(plan: Plan) -> float:
    """Return how many rows of a microbatch meet each expert of a rank, if loads are balanced.

    They come from all ranks of the expert group: n m k / E, less what is dropped.
    """
    return kept_assignments(plan) * plan.mesh.ep / experts_of(plan).num_experts


def expert_blocks(plan: Plan, stage: StagePart) -> tuple[int, ...]:
    """Return the blocks of a stage that are mixtures of experts."""
    return tuple(block for block in stage.blocks if plan.model.layer_has_experts(block))


def expert_passes(plan: Plan, part: RankPart) -> tuple[int, int]:
    """Return how often a step runs blocks with experts forward, and how often once more."""
    recomputes = plan.layout.recompute.recomputes
    found = [(one.microbatches, expert_blocks(plan, one)) for one in part.stages]
    return (
        sum(count * len(blocks) for count, blocks in found),
        sum(count * sum(map(recomputes, blocks)) for count, blocks in found),
    )


def block_passes(plan: Plan, part: RankPart) -> Iterator[BlockPass]:
    """Yield each microbatch in each block with experts of a pipeline rank."""
    placement = stage_placement_from_plan(plan)
    for stage in part.stages:
        for microbatch in range(plan.num_microbatches):
            if placement.rank_of(stage.stage, microbatch) == part.pp_rank:
                for block in expert_blocks(plan, stage):
                    yield block, microbatch


def expert_load_from_routing(
    plan: Plan, rank: int, chosen: Mapping[int, NDArray[np.int64]]
) -> ExpertLoad:
    """Return the load of the expert group of `rank`, of how a global batch was routed.

    `chosen[layer]` is [sequences, positions, k]: the experts of each token, negative where dropped.
    """
    groups = plan.mesh.expert_groups(expert_tp=plan.layout.experts.expert_tp)
    group = next(ranks for ranks in groups if rank in ranks)
    return ExpertLoad(
        num_experts=experts_of(plan).num_experts,
        choices={
            (layer, microbatch): tuple(
                _dispatched_choices(plan, member, microbatch, chosen_BTK) for member in group
            )
            for layer, chosen_BTK in chosen.items()
            for microbatch in range(plan.num_microbatches)
        },
    )


def _dispatched_choices(
    plan: Plan, rank: int, microbatch: int, chosen_BTK: NDArray[np.int64]
) -> ExpertChoices:
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
