# SPDX-License-Identifier: Apache-2.0
"""Bytes that mixtures of experts send: equal to what the run records.

N tokens are a microbatch on a rank of context, m of them the rows that a rank dispatches; D is the
hidden width, E the experts, k those of a token, `s` the bytes of an element, g = max(4, s) those of
a gate, n the degree of the axis. What goes to experts and back is in
`cost/bytes/experts/dispatch.py`; all else follows from the plan alone. Per block with experts and
microbatch:

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
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.all_reduce import slices_sent, sums_sent
from echelon.cost.bytes.data import STAGE_AXIS
from echelon.cost.bytes.experts.dispatch import dispatch_bytes, gate_bytes
from echelon.cost.bytes.terms import (
    INDEX_BYTES,
    SentBytes,
    SentTerm,
    all_gather_bytes,
    all_reduce_bytes,
    element_bytes,
    pass_terms,
)
from echelon.layout.expert_load import ExpertLoad, expert_blocks, expert_passes, experts_of
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
    yield from dispatch_bytes(plan, part, load)
    yield from tensor_expert_bytes(plan, part, rank)
    yield from sequence_bytes(plan, part)
    yield from routing_bytes(plan, part)


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


def sequence_bytes(plan: Plan, part: RankPart) -> Iterator[SentTerm]:
    """Yield the terms of the axis "sequence": what is counted, or decided, by sequence."""
    experts, balance = experts_of(plan), plan.mathematics.balance
    degree = plan.mesh.degree(Axis.CP, Axis.TP)
    count = sum(expert_passes(plan, part))
    if degree == 1:
        return

    def term(name: str, each: int, formula: str, source: str) -> SentTerm:
        return SentTerm(
            axis=SEQUENCE_AXIS, name=name, count=count, each=each, formula=formula, source=source
        )

    if balance.counts_first:
        by_sequence = balance.aux_over == "sequence"
        scopes = plan.layout.microbatch_sequences if by_sequence else 1
        payload = scopes * experts.num_experts * INDEX_BYTES
        formula = f"2 (n-1)/n {'B E' if by_sequence else 'E'} 8"
        yield term("counts of sequences", all_reduce_bytes(payload, degree), formula, _BALANCE)
    if balance.capacity_factor is not None:
        rows = plan.local_tokens // plan.mesh.tp
        choices = all_gather_bytes(rows * (1 + experts.top_k) * INDEX_BYTES, degree)
        yield term("choices of sequences", choices, "(n-1) N/tp (1 + k) 8", _DISPATCH)
        if balance.drop == "score":
            gates = all_gather_bytes(rows * experts.top_k * gate_bytes(plan), degree)
            yield term("gates of sequences", gates, "(n-1) N/tp k g", _DISPATCH)


def routing_bytes(plan: Plan, part: RankPart) -> Iterator[SentTerm]:
    """Yield what a stage adds up once per step: how each layer routed the whole global batch."""
    layers = len({block for one in part.stages for block in expert_blocks(plan, one)})
    payload = layers * (2 * experts_of(plan).num_experts + 3) * INDEX_BYTES
    degree = plan.mesh.world_size // plan.mesh.pp
    groups = [(STAGE_AXIS, degree), (Axis.PP.value, 2 if part.mirrored else 1)]
    for axis, size in groups:
        yield SentTerm(
            axis=axis,
            name=ROUTING_TERM,
            each=all_reduce_bytes(payload, size),
            formula="2 (n-1)/n layers (2 E + 3) 8",
            source=_BALANCE,
        )
