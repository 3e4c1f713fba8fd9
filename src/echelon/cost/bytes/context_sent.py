# SPDX-License-Identifier: Apache-2.0
"""Bytes that context parallelism sends, by kind: equal to what the run records.

B sequences are a microbatch, T positions a sequence, c the degree `cp`, u that of Ulysses and
n = c / u that of the ring; H query and K key/value heads of width h on a tensor rank, s the bytes
of an element, w = max(4, s) those of a gradient that is still being added up. A *row* of keys is
one position of all sequences: 2 B K h elements. Per block and microbatch:

    ring, striped   forward   rows handed on x s: (n-1) T/n of them where every place needs all
                    backward  the same again, and the rows of gradients handed on x w
    gathered        forward   (n-1) T/n rows x s
                    backward  the same again, and (n-1) T/n rows x w
    ulysses         forward   (u-1)/u B T/c (2 H + 2 K') h s, K' the key/value heads with copies
                    backward  the same

Blocks with a window hand on fewer rows than blocks without: each kind has its own terms. Inside of
a ring, Ulysses has left 1/u of the heads (K' / u) and given u times the positions. What a
mask hides is not handed on (`layout/ring_transfers.py`), so the places of a ring differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.all_reduce import num_elsewhere
from echelon.cost.bytes.terms import (
    WIDE_BYTES,
    SentTerm,
    all_gather_bytes,
    all_to_all_bytes,
    element_bytes,
    pass_terms,
    reduce_scatter_bytes,
)
from echelon.layout.ring_transfers import (
    RingTransfers,
    RowTransfer,
    direct_transfers,
    num_rows,
    ring_transfers,
)
from echelon.layout.stage import RankPart, StagePart, plan_of_layer


def kv_copies(heads: int, kv_heads: int, degree: int) -> int:
    """Return to how many members of a Ulysses group each key/value head goes.

    The fewest with which every member gets as many heads, and those that its query heads meet.
    """
    repeats = heads // kv_heads
    return next(c for c in range(1, repeats + 1) if repeats % c == 0 and kv_heads * c % degree == 0)


def ring_transfers_from_plan(plan: Plan) -> RingTransfers:
    """Return which rows go where between the places of a ring."""
    sends_all_at_once = plan.layout.context.record.gathers_keys
    return (direct_transfers if sends_all_at_once else ring_transfers)(
        plan.placement, plan.model.mask
    )


def gathers_whole(plan: Plan) -> bool:
    """Return whether keys and values are gathered by a collective: every row to every place."""
    return plan.layout.context.record.gathers_keys and plan.model.window is None


def kv_row_elements(plan: Plan) -> int:
    """Return the elements of one row of keys and values on the ring."""
    model, tp = plan.model, plan.mesh.tp
    degree = plan.layout.context.ulysses_degree
    copies = kv_copies(model.heads // tp, model.kv_heads // tp, degree)
    heads = model.kv_heads // tp * copies // degree
    return 2 * plan.layout.microbatch_sequences * heads * model.head_dim


def context_bytes(
    plan: Plan, part: RankPart, cp_rank: int, ranks: tuple[int, ...] = ()
) -> Iterator[SentTerm]:
    """Yield the terms of the axis "cp" for a context rank of these stages.

    `ranks` are the ranks of its context group; without them `far` of the terms is None.
    """
    if plan.mesh.cp == 1:
        return
    redoes = partial(plan.layout.recompute.redoes, "attention")
    blocks = sum(one.microbatches * len(one.blocks) for one in part.stages)
    again = sum(one.microbatches * sum(map(redoes, one.blocks)) for one in part.stages)
    yield from _ulysses(plan, (blocks, again), (cp_rank, ranks))
    if plan.placement.ring_degree == 1:
        return
    kinds = plan.model.first_of_kinds
    for first in kinds:
        kind = plan.model.layer_kind(first)
        alike = [
            (one.microbatches, [b for b in one.blocks if plan.model.layer_kind(b) == kind])
            for one in part.stages
        ]
        counts = (
            sum(count * len(mine) for count, mine in alike),
            sum(count * sum(map(redoes, mine)) for count, mine in alike),
        )
        if counts[0]:
            of_kind = f" of {kind} blocks" if len(kinds) > 1 else ""
            yield from _ring(plan_of_layer(plan, first), counts, (cp_rank, ranks), of_kind)


def block_bytes(plan: Plan, cp_rank: int) -> tuple[int, int]:
    """Return what a context rank sends for one block and microbatch: forward, backward."""
    one = StagePart(stage=0, blocks=(0,), first=False, last=False, microbatches=1)
    part = RankPart(pp_rank=0, stages=(one,), mirrored=False)
    terms = [term for term in context_bytes(plan, part, cp_rank) if "again" not in term.name]
    forward = sum(term.each for term in terms if term.name.endswith("forward"))
    return forward, sum(term.each for term in terms) - forward


_Where = tuple[int, tuple[int, ...]]
"""A context rank, and the ranks of its group (empty if unknown)."""


def _ulysses(plan: Plan, counts: tuple[int, int], where: _Where) -> Iterator[SentTerm]:
    degree, size = plan.layout.context.ulysses_degree, element_bytes(plan)
    model, tp = plan.model, plan.mesh.tp
    if degree == 1:
        return
    heads, kv_heads = model.heads // tp, model.kv_heads // tp
    kv_heads *= kv_copies(heads, kv_heads, degree)
    token = model.head_dim * size * plan.local_tokens
    payloads = (heads + 2 * kv_heads) * token, heads * token
    each, far = sum(all_to_all_bytes(payload, degree) for payload in payloads), None
    cp_rank, ranks = where
    if ranks:
        first = cp_rank // degree * degree
        beyond = num_elsewhere(plan, ranks[first : first + degree], ranks[cp_rank])
        far = beyond * sum(payload // degree for payload in payloads)
    yield from pass_terms(
        Axis.CP,
        "heads for positions",
        "Jacobs et al., DeepSpeed-Ulysses, 2023, section 3.2",
        counts=counts,
        each=((each, far), (each, far)),
        formulas=("(u-1)/u B T/c (2 H + 2 K') h s",) * 2,
    )


def _ring(plan: Plan, counts: tuple[int, int], where: _Where, of_kind: str) -> Iterator[SentTerm]:
    """Yield what blocks of one kind of attention send: `counts` in all, and made again."""
    elements, size = kv_row_elements(plan), element_bytes(plan)
    wide, (cp_rank, ranks) = max(size, WIDE_BYTES), where
    u, place = plan.layout.context.ulysses_degree, plan.placement.ring_place(cp_rank)
    ring = ranks[cp_rank % u :: u]
    far: tuple[int | None, int | None] = (None, None)
    if gathers_whole(plan):
        degree = plan.placement.ring_degree
        piece = plan.mathematics.sequence_length // degree * elements
        keys = all_gather_bytes(piece * size, degree)
        gradients = reduce_scatter_bytes(piece * wide, degree)
        if ranks:
            beyond = num_elsewhere(plan, ring, ring[place])
            far = beyond * piece * size, beyond * piece * wide
        formula, source = "(n-1) T/n rows", "Grattafiori et al., Llama 3, 2024, section 3.3.2"
    else:
        routes = ring_transfers_from_plan(plan)
        sent = [transfer for transfer in routes.keys if transfer.source == place]
        back = [transfer for transfer in routes.gradients if transfer.source == place]
        keys, gradients = (_rows(moved) * elements for moved in (sent, back))
        keys, gradients = keys * size, gradients * wide
        if ranks:
            leaving, going_back = (
                _rows([t for t in moved if num_elsewhere(plan, (ring[t.target],), ring[place])])
                for moved in (sent, back)
            )
            far = leaving * elements * size, going_back * elements * wide
        formula, source = "rows handed on", "Liu et al., Ring Attention, 2023, section 3"
    yield from pass_terms(
        Axis.CP,
        f"keys and values{of_kind}",
        source,
        counts=counts,
        each=((keys, far[0]), (keys, far[0])),
        formulas=(f"{formula} x s",) * 2,
    )
    yield SentTerm(
        axis=Axis.CP.value,
        name=f"their gradients{of_kind}",
        count=counts[0],
        each=gradients,
        far=far[1],
        formula=f"{formula} x w",
        source=source,
    )


def _rows(transfers: Iterable[RowTransfer]) -> int:
    return sum(num_rows(transfer.rows) for transfer in transfers)
