# SPDX-License-Identifier: Apache-2.0
"""Bytes that mixtures of experts send: equal to what the run records.

N tokens are a microbatch on a rank of context, m of them the rows that a rank dispatches; D is the
hidden width, E the experts, k those of a token, `s` the bytes of an element, g = max(4, s) those of
a gate, n the degree of the axis. What goes to experts and back
depends on the routing; all else follows from the plan alone. Per block with experts and microbatch:

On "tp" (where n tensor ranks have one stream), by whether experts are whole or in pieces, and
whether the stream is scattered (sequence parallelism):

    whole, scattered   nothing: each rank routes and dispatches the rows that it holds
    whole              (n-1)/n N D s        outputs of all; backward as much, of gradients
    pieces, scattered  (n-1)/n N D s twice  rows before, sums after; backward as much
    pieces             2 (n-1)/n N D s      the sum of the outputs; backward as much, of rows
    pieces, both       (n-1)/n N k (8 + g)  choices and gates; backward gates alone

On "sequence", the n = cp x tp ranks with tokens of the same sequences, in each forward pass: the
counts of each sequence (or of the microbatch) where the auxiliary loss is of that scope, and with a
capacity the keys and choices of all tokens (gates too, where the score decides).

On "stage", all ranks of a stage, once per step: counts, probabilities and three sums of each layer.

To experts and back, by kind of dispatch: a hop is an exchange of rows over one axis, of which S
leave a rank and R arrive. Its four motions send, with rows of r bytes, and d where gates ride
along:

    dispatch forward   S d        combine forward   R r
    combine backward   S r        dispatch backward R d

    flat       "ep"         r = D s   d = D s + g     S, R: assignments to experts on other ranks
    padded     "ep"         the same                  S = R = (n-1)/n E slots, full or not
    two hops   "ep_across"  r = D s   d = D s + k g   S, R: pairs of a token and another node
               "ep_within"  as flat, of what is on a node after the first hop

Sizes that follow from the routing are told first, in each chunk of each forward pass: n - 1 ranks
get one int64 for each of their experts (flat, within), or for each node (across). Across nodes the
k choices of each token (int32) go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.all_reduce import (
    num_elsewhere,
    pairs_sent,
    ring_sent,
    slices_sent,
    sums_sent,
)
from echelon.cost.bytes.data import STAGE_AXIS
from echelon.cost.bytes.terms import (
    INDEX_BYTES,
    WIDE_BYTES,
    SentBytes,
    SentTerm,
    all_to_all_bytes,
    element_bytes,
    pass_terms,
)
from echelon.layout.data_groups import mirror_ranks
from echelon.layout.expert_load import (
    BlockPass,
    ExpertLoad,
    RowCounts,
    balanced_pairs,
    balanced_rows,
    block_passes,
    expert_blocks,
    expert_passes,
    experts_of,
    num_nodes,
    padded_slots,
)
from echelon.layout.muon import STAGE_AXES
from echelon.layout.stage import RankPart

SEQUENCE_AXIS = "sequence"
"""The ranks that hold tokens of the same sequences: `cp` x `tp`."""

ROUTING_TERM = "routing of a step"
"""What a stage tells of its experts, in a step that updates nothing too."""

_DISPATCH = "Lepikhin et al., GShard, 2020"
_PIECES = "Singh et al., hybrid tensor-expert-data parallelism, 2023"
_BALANCE = "Fedus et al., Switch Transformers, 2021, section 2.2"


def expert_bytes(
    plan: Plan, part: RankPart, rank: int, load: ExpertLoad | None = None
) -> Iterator[SentTerm]:
    """Yield what a rank sends for its experts; `load` is how its expert group was routed."""
    if plan.model.experts is None or not any(expert_blocks(plan, one) for one in part.stages):
        return
    yield from dispatch_bytes(plan, part, load, rank)
    yield from tensor_expert_bytes(plan, part, rank)
    yield from sequence_bytes(plan, part, rank)
    yield from routing_bytes(plan, part, rank)


def tensor_expert_bytes(plan: Plan, part: RankPart, rank: int) -> Iterator[SentTerm]:
    """Yield the terms of the axis "tp": rows before experts, outputs after them."""
    degree, whole = plan.mesh.tp, plan.layout.experts.expert_tp == 1
    scattered = plan.layout.sequence_parallel
    if degree == 1 or (whole and scattered):
        return
    elements, size = plan.local_tokens * plan.model.hidden, element_bytes(plan)
    ranks = plan.mesh.group(rank, Axis.TP)
    gathered = slices_sent(plan, ranks, rank, elements * size // degree)
    if whole:
        name = "outputs of experts"
        yield from _passes(plan, part, name, (gathered, gathered), "(n-1)/n N D s")
        return
    if scattered:
        both = slices_sent(plan, ranks, rank, 2 * (elements * size // degree))
        formula = "2 (n-1)/n N D s: rows gathered, sums scattered"
    else:
        both = sums_sent(plan, ranks, rank, (elements,), size)
        formula = "2 (n-1)/n N D s: sums"
    yield from _passes(plan, part, "rows and outputs of experts", (both, both), formula)
    chosen = plan.local_tokens // degree * experts_of(plan).top_k
    gate, formula = gate_bytes(plan), "(n-1)/n N k (8 + g), backward g alone"
    gates, both = (
        slices_sent(plan, ranks, rank, chosen * each) for each in (gate, INDEX_BYTES + gate)
    )
    yield from _passes(plan, part, "choices and gates", (both, gates), formula)


def _passes(
    plan: Plan, part: RankPart, name: str, sent: tuple[SentBytes, SentBytes], formula: str
) -> Iterator[SentTerm]:
    counts, formulas = expert_passes(plan, part), (formula, formula)
    return pass_terms(Axis.TP, name, _PIECES, counts=counts, each=sent, formulas=formulas)


def sequence_bytes(plan: Plan, part: RankPart, rank: int) -> Iterator[SentTerm]:
    """Yield the terms of the axis "sequence": what is counted, or decided, by sequence."""
    experts, balance = experts_of(plan), plan.mathematics.balance
    ranks = plan.mesh.group(rank, Axis.CP, Axis.TP)
    count = sum(expert_passes(plan, part))
    if len(ranks) == 1:
        return

    def term(name: str, sent: tuple[int, int], formula: str, source: str) -> SentTerm:
        return SentTerm(
            axis=SEQUENCE_AXIS,
            name=name,
            count=count,
            each=sent[0],
            far=sent[1],
            formula=formula,
            source=source,
        )

    if balance.counts_first:
        by_sequence = balance.aux_over == "sequence"
        scopes = plan.layout.microbatch_sequences if by_sequence else 1
        payload = scopes * experts.num_experts * INDEX_BYTES
        formula = f"2 (n-1)/n {'B E' if by_sequence else 'E'} 8"
        yield term("counts of sequences", ring_sent(plan, ranks, rank, payload), formula, _BALANCE)
    if balance.capacity_factor is not None:
        rows = plan.local_tokens // plan.mesh.tp
        choices = pairs_sent(plan, ranks, rank, rows * (1 + experts.top_k) * INDEX_BYTES)
        yield term("choices of sequences", choices, "(n-1) N/tp (1 + k) 8", _DISPATCH)
        if balance.drop == "score":
            gates = pairs_sent(plan, ranks, rank, rows * experts.top_k * gate_bytes(plan))
            yield term("gates of sequences", gates, "(n-1) N/tp k g", _DISPATCH)


def routing_bytes(plan: Plan, part: RankPart, rank: int) -> Iterator[SentTerm]:
    """Yield what a stage adds up once per step: how each layer routed the whole global batch."""
    layers = len({block for one in part.stages for block in expert_blocks(plan, one)})
    payload = layers * (2 * experts_of(plan).num_experts + 3) * INDEX_BYTES
    pair = mirror_ranks(plan, rank) if part.mirrored else (rank,)
    groups = [(STAGE_AXIS, plan.mesh.group(rank, *STAGE_AXES)), (Axis.PP.value, pair)]
    for axis, ranks in groups:
        each, far = ring_sent(plan, ranks, rank, payload)
        yield SentTerm(
            axis=axis,
            name=ROUTING_TERM,
            each=each,
            far=far,
            formula="2 (n-1)/n layers (2 E + 3) 8",
            source=_BALANCE,
        )


CHOICE_BYTES = 4
"""Choices that cross nodes are int32."""

ACROSS_AXIS, WITHIN_AXIS = "ep_across", "ep_within"
"""The ranks of an expert group with the same place on each node, and those of one node."""

_GSHARD = "Lepikhin et al., GShard, 2020, section 2.2"
_TWO_HOPS = "DeepSeek-V3, 2024, section 3.2.2"


def dispatch_bytes(
    plan: Plan, part: RankPart, load: ExpertLoad | None, rank: int | None = None
) -> Iterator[SentTerm]:
    """Yield the terms of tokens that a rank sends; `load` is the routing of its expert group.

    Without `rank`, `far` of the terms of one hop is None.
    """
    if plan.mesh.ep == 1:
        return
    layout = plan.layout.experts
    if layout.padded:
        yield from padded_dispatch_bytes(plan, part, rank)
    elif layout.dispatch == "two-hop":
        yield from two_hop_dispatch_bytes(plan, part, load)
    else:
        yield from flat_dispatch_bytes(plan, part, load, rank)


def _expert_share_elsewhere(plan: Plan, rank: int | None) -> Fraction | None:
    """Share of the other ranks of an expert group that are on other nodes."""
    if rank is None:
        return None
    mesh, ep = plan.mesh, plan.mesh.ep
    fold = mesh.group(rank, *mesh.expert_fold(expert_tp=plan.layout.experts.expert_tp))
    first = fold.index(rank) // ep * ep
    return Fraction(num_elsewhere(plan, fold[first : first + ep], rank), ep - 1)


def flat_dispatch_bytes(
    plan: Plan, part: RankPart, load: ExpertLoad | None, rank: int | None
) -> Iterator[SentTerm]:
    """Yield what is sent where each assignment goes straight to the rank of its expert."""
    far, ep = _expert_share_elsewhere(plan, rank), plan.mesh.ep
    hop = _HopTerms(plan, part, Axis.EP.value, _GSHARD, far=far)
    yield hop.counts(experts_of(plan).num_experts, ep)
    balanced = (balanced_rows(plan, ep), "S = R = (n-1)/n m k, balanced")
    yield from hop.transfers(load, balanced, lambda one, load: load.rows(one, part.expert_index))


def padded_dispatch_bytes(plan: Plan, part: RankPart, rank: int | None) -> Iterator[SentTerm]:
    """Yield what is sent where each rank has so many slots for each expert, whatever the routing.

    Exact without a record. There are no counts: all sizes are known.
    """
    slots = experts_of(plan).num_experts * padded_slots(plan)
    leaving = all_to_all_bytes(slots, plan.mesh.ep) * plan.layout.experts.chunks
    sizes = (RowCounts(leaving=leaving, arriving=leaving), "S = R = (n-1)/n E slots")
    far = _expert_share_elsewhere(plan, rank)
    yield from _HopTerms(plan, part, Axis.EP.value, _GSHARD, far=far).transfers(None, sizes)


def two_hop_dispatch_bytes(
    plan: Plan, part: RankPart, load: ExpertLoad | None
) -> Iterator[SentTerm]:
    """Yield what is sent where a token crosses to each node that it reaches once."""
    experts, nodes, place = experts_of(plan), num_nodes(plan), part.expert_index
    all_leave, none_leaves, gates = Fraction(1), Fraction(0), experts.top_k
    across = _HopTerms(plan, part, ACROSS_AXIS, _TWO_HOPS, gates_of_row=gates, far=all_leave)
    yield across.counts(nodes, nodes)
    balanced = (balanced_pairs(plan, nodes), "pairs of a token and a node, balanced")

    def pairs(one: BlockPass, load: ExpertLoad) -> RowCounts:
        return load.pairs(one, place, nodes)

    yield from across.choices(load, balanced, pairs)
    yield from across.transfers(load, balanced, pairs)
    within = _HopTerms(plan, part, WITHIN_AXIS, _TWO_HOPS, far=none_leaves)
    ranks = plan.mesh.ep // nodes
    yield within.counts(experts.num_experts // nodes, ranks)
    balanced = (balanced_rows(plan, ranks), "S = R = (n-1)/n m k, balanced")
    yield from within.transfers(
        load, balanced, lambda one, load: load.rows_within(one, place, nodes)
    )


_BalancedRows = tuple[RowCounts, str]
"""The rows of one crossing that are sent without a record, and how they are found."""

_RowsOf = Callable[[BlockPass, ExpertLoad], RowCounts]


def _no_rows(_: BlockPass, load: ExpertLoad) -> RowCounts:
    raise AssertionError(f"the sizes do not follow from a routing of {load.num_experts} experts")


@dataclass(frozen=True, slots=True)
class _HopTerms:
    """Make the terms of one hop of the tokens of a rank."""

    plan: Plan
    part: RankPart
    axis: str
    source: str
    gates_of_row: int = 1
    far: Fraction | None = None
    """Share of the other members that are on other nodes; each gets as many rows."""

    def _far(self, each: int, load: ExpertLoad | None = None) -> int | None:
        """Bytes of `each` that leave the node; None if they depend on a routing."""
        mixed = self.far is None or 0 < self.far < 1
        return None if self.far is None or (load and mixed) else int(each * self.far)

    def counts(self, num_targets: int, degree: int) -> SentTerm:
        """Return the term of what each rank tells: how many rows go to each target."""
        chunks = self.plan.layout.experts.chunks
        each = all_to_all_bytes(num_targets * INDEX_BYTES, degree)
        return SentTerm(
            axis=self.axis,
            name="counts of rows",
            count=sum(expert_passes(self.plan, self.part)) * chunks,
            each=each,
            far=self._far(each),
            formula="(n-1)/n x targets x 8",
            source=self.source,
        )

    def choices(
        self, load: ExpertLoad | None, balanced: _BalancedRows, rows_of: _RowsOf
    ) -> Iterator[SentTerm]:
        """Yield the terms of the choices that go with tokens."""
        size = experts_of(self.plan).top_k * CHOICE_BYTES
        yield self._term("choices forward", load, balanced, rows_of, (size, 0), "S k 4")
        yield self._term("choices forward again", load, balanced, rows_of, (size, 0), "S k 4")

    def transfers(
        self, load: ExpertLoad | None, balanced: _BalancedRows, rows_of: _RowsOf = _no_rows
    ) -> Iterator[SentTerm]:
        """Yield the terms of dispatch and combine, forward and backward."""
        row = self.plan.model.hidden * element_bytes(self.plan)
        gated = row + self.gates_of_row * gate_bytes(self.plan)
        with_gates = "(D s + g)" if self.gates_of_row == 1 else "(D s + k g)"
        for name, sizes, formula in (
            ("dispatch forward", (gated, 0), f"S {with_gates}"),
            ("combine forward", (0, row), "R D s"),
            ("dispatch forward again", (gated, 0), f"S {with_gates}"),
            ("combine forward again", (0, row), "R D s"),
            ("combine backward", (row, 0), "S D s"),
            ("dispatch backward", (0, gated), f"R {with_gates}"),
        ):
            yield self._term(name, load, balanced, rows_of, sizes, formula)

    def _term(
        self,
        name: str,
        load: ExpertLoad | None,
        balanced: _BalancedRows,
        rows_of: _RowsOf,
        sizes: tuple[int, int],
        formula: str,
    ) -> SentTerm:
        """Return the term of one motion; `sizes` are the bytes of rows that leave and arrived."""
        again = name.endswith("again")
        if load is None:
            moved, how = balanced
            count, formula = expert_passes(self.plan, self.part)[again], f"{formula}, {how}"
            rounds = [moved]
        else:
            recomputes = self.plan.layout.recompute.recomputes
            passes = block_passes(self.plan, self.part)
            count, formula = 1, f"{formula}, of the recorded routing"
            rounds = [rows_of(run, load) for run in passes if not again or recomputes(run[0])]
        each = sum(rows.leaving * sizes[0] + rows.arriving * sizes[1] for rows in rounds)
        return SentTerm(
            axis=self.axis,
            name=name,
            count=count,
            each=each,
            far=self._far(each, load),
            formula=formula,
            source=self.source,
        )


def gate_bytes(plan: Plan) -> int:
    """Return g: the bytes of a gate."""
    return max(WIDE_BYTES, element_bytes(plan))
