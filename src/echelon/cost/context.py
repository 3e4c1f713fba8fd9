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

Inside of a ring, Ulysses has left 1/u of the heads (K' / u) and given u times the positions. What a
mask hides is not handed on (`cost/context_routes.py`), so the places of a ring differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.collectives import all_gather_bytes, all_to_all_bytes, reduce_scatter_bytes
from echelon.cost.context_routes import Routes, direct_routes, num_rows, ring_routes
from echelon.cost.stage import RankPart
from echelon.cost.terms import SentTerm

GRADIENT_LEAST_BYTES = 4
"""Gradients of keys and values are added up in at least fp32, on their way too."""


def kv_copies(heads: int, kv_heads: int, degree: int) -> int:
    """Return to how many members of a Ulysses group each key/value head goes.

    The fewest with which every member gets as many heads, and those that its query heads meet.
    """
    repeats = heads // kv_heads
    return next(c for c in range(1, repeats + 1) if repeats % c == 0 and kv_heads * c % degree == 0)


def routes_of(plan: Plan) -> Routes:
    """Return which rows go where between the places of a ring."""
    sends_all_at_once = plan.layout.context.kind == "gathered"
    return (direct_routes if sends_all_at_once else ring_routes)(plan.placement, plan.model.mask)


def gathers_whole(plan: Plan) -> bool:
    """Return whether keys and values are gathered by a collective: every row to every place."""
    return plan.layout.context.kind == "gathered" and plan.model.window is None


def kv_row_elements(plan: Plan) -> int:
    """Return the elements of one row of keys and values on the ring."""
    model, tp = plan.model, plan.mesh.tp
    degree = plan.layout.context.ulysses_degree
    copies = kv_copies(model.heads // tp, model.kv_heads // tp, degree)
    heads = model.kv_heads // tp * copies // degree
    return 2 * plan.layout.microbatch_sequences * heads * model.head_dim


def context_bytes(plan: Plan, part: RankPart, cp_rank: int) -> Iterator[SentTerm]:
    """Yield the terms of the axis "cp" for a context rank of these stages."""
    if plan.mesh.cp == 1:
        return
    recomputes = plan.layout.recompute.recomputes
    blocks = sum(one.microbatches * len(one.blocks) for one in part.stages)
    again = sum(one.microbatches * sum(map(recomputes, one.blocks)) for one in part.stages)
    yield from _ulysses(plan, blocks, again)
    if plan.placement.ring_degree > 1:
        yield from _ring(plan, blocks, again, plan.placement.ring_place(cp_rank))


def _ulysses(plan: Plan, blocks: int, again: int) -> Iterator[SentTerm]:
    degree, size = plan.layout.context.ulysses_degree, _size(plan)
    model, tp = plan.model, plan.mesh.tp
    if degree == 1:
        return
    heads, kv_heads = model.heads // tp, model.kv_heads // tp
    kv_heads *= kv_copies(heads, kv_heads, degree)
    token = model.head_dim * size * plan.local_tokens
    each = all_to_all_bytes((heads + 2 * kv_heads) * token, degree)
    each += all_to_all_bytes(heads * token, degree)
    for name, count in (("forward", blocks), ("forward again", again), ("backward", blocks)):
        yield SentTerm(
            axis=Axis.CP.value,
            name=f"heads for positions {name}",
            count=count,
            each=each,
            formula="(u-1)/u B T/c (2 H + 2 K') h s",
            source="Jacobs et al., DeepSpeed-Ulysses, 2023, section 3.2",
        )


def _ring(plan: Plan, blocks: int, again: int, place: int) -> Iterator[SentTerm]:
    elements, size = kv_row_elements(plan), _size(plan)
    wide = max(size, GRADIENT_LEAST_BYTES)
    if gathers_whole(plan):
        degree = plan.placement.ring_degree
        piece = plan.mathematics.sequence_length // degree * elements
        keys = all_gather_bytes(piece * size, degree)
        gradients = reduce_scatter_bytes(piece * wide, degree)
        formula, source = "(n-1) T/n rows", "Grattafiori et al., Llama 3, 2024, section 3.3.2"
    else:
        routes = routes_of(plan)
        sent = [hop.rows for hop in routes.keys if hop.source == place]
        back = [hop.rows for hop in routes.gradients if hop.source == place]
        keys = sum(map(num_rows, sent)) * elements * size
        gradients = sum(map(num_rows, back)) * elements * wide
        formula, source = "rows handed on", "Liu et al., Ring Attention, 2023, section 3"
    for name, count, each, tail in (
        ("keys and values forward", blocks, keys, "x s"),
        ("keys and values forward again", again, keys, "x s"),
        ("keys and values backward", blocks, keys, "x s"),
        ("their gradients", blocks, gradients, "x w"),
    ):
        yield SentTerm(
            axis=Axis.CP.value,
            name=name,
            count=count,
            each=each,
            formula=f"{formula} {tail}",
            source=source,
        )


def _size(plan: Plan) -> int:
    return DTYPE_BYTES[plan.mathematics.precision.parameters]
