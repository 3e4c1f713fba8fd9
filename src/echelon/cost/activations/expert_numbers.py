# SPDX-License-Identifier: Apache-2.0
"""The numbers of a mixture of experts on a rank: balanced, or those of a recorded routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.dispatch import DispatchChunk, HopRows, RowBytes
from echelon.cost.activations.experts import ExpertNumbers
from echelon.cost.activations.linear import ExpertProducts
from echelon.cost.activations.numbers import CACHE_ELEMENTS, GPU_CHUNK_ELEMENTS, PRODUCT_ROWS
from echelon.cost.bytes.terms import INDEX_BYTES, WIDE_BYTES
from echelon.layout.expert_load import (
    BlockPass,
    ExpertLoad,
    balanced_pairs,
    balanced_rows,
    counted_on_device,
    dispatched_tokens,
    even_pairs,
    expert_capacity,
    experts_of,
    num_nodes,
    padded_slots,
    rows_at_experts,
)
from echelon.layout.stage import expert_index_of

_PLACES = 3
"""int64 of an assignment: its slot, its token, and its place in the order of tokens."""

END_BYTES = 4
"""Where the rows of an expert end is told a device in an int32."""

GROUPED_MULTIPLE = 8
"""Sides of the matrices that a grouped product takes are multiples of so many 16-bit elements."""

_CLAMPED_FORWARD = 1
"""How many more tensors a clamped SwiGLU has at a time than SwiGLU, forward."""
_CLAMPED_BACKWARD = 3
"""The same backward."""

_CHOICES = 65
"""Bytes of an assignment while it is found which ones an expert has room for: eight int64, a bool
(`models/moe.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Count one chunk: its hops (none where it is padded), and the rows of each expert here."""

    hops: tuple[HopRows, ...]
    by_expert: tuple[int, ...]


def expert_numbers(
    plan: Plan, rank: int, crossing: BlockPass | None = None, load: ExpertLoad | None = None
) -> ExpertNumbers:
    """Return the numbers of one microbatch in one block: of a record where there is one."""
    experts, balance, tp = experts_of(plan), plan.mathematics.balance, plan.mesh.tp
    layout, ep = plan.layout.experts, plan.mesh.ep
    if layout.padded:
        parts = _padded(plan)
    elif load is None or crossing is None:
        parts = _balanced(plan)
    else:
        parts = tuple(_recorded(plan, rank, crossing, one) for one in _cut(plan, crossing, load))
    inner = experts.ffn // layout.expert_tp
    deferred = ep > 1 or tp > 1 or has_grouped_products(plan)
    chunks = tuple(_chunk(plan, one, deferred=deferred) for one in parts)
    return ExpertNumbers(
        routed=plan.local_tokens // tp,
        experts=experts.num_experts,
        top_k=experts.top_k,
        here=sum(sum(one.by_expert) for one in parts),
        inner=inner,
        shared_inner=experts.ffn * experts.shared_experts // tp,
        places=_places(plan, parts),
        spare=layout.chunks * int(layout.padded and ep in (1, experts.num_experts)),
        renormalised=int(experts.renormalise),
        sigmoid=int(experts.router == "sigmoid"),
        auxiliary=int(balance.has_aux),
        by_sequence=int(balance.aux_over != "global"),
        z_loss=int(balance.z_coefficient > 0.0),
        limiting=_limiting(plan),
        chunks=chunks,
        vectors=sum(one.vectors for one in chunks),
        logit_bias=int(experts.logit_bias),
        deferred=int(deferred),
        product=_product(plan, parts),
        row_chunks=int(layout.expert_tp > 1),
    )


def has_grouped_products(plan: Plan) -> bool:
    """Return whether products of all experts are one launch (`expert/grouped_matmul.py`)."""
    inner = experts_of(plan).ffn // plan.layout.experts.expert_tp
    aligned = not (plan.model.hidden % GROUPED_MULTIPLE or inner % GROUPED_MULTIPLE)
    on_gpu = plan.cluster.backend == "nccl" and not experts_of(plan).bias
    return on_gpu and aligned and plan.mathematics.precision.parameters == "bf16"


def _product(plan: Plan, parts: tuple[_Part, ...]) -> int:
    """Return what the weight gradients of experts have beside what they keep.

    That is rows that are widened; nothing where a product adds up in the dtype of the sum.
    """
    precision, hidden = plan.mathematics.precision, plan.model.hidden
    inner = experts_of(plan).ffn // plan.layout.experts.expert_tp
    if precision.gradients == precision.parameters:
        return 0
    if plan.cluster.backend == "nccl" and precision.gradients == "fp32":
        return 0
    rows = min(PRODUCT_ROWS, max((max(one.by_expert, default=0) for one in parts), default=0))
    codes = [ExpertProducts.of(plan, inner, one.by_expert).weight_gradient for one in parts]
    return rows * (2 * inner + hidden) * WIDE_BYTES + max(codes, default=0)


def _chunk(plan: Plan, part: _Part, *, deferred: bool) -> DispatchChunk:
    experts, layout = experts_of(plan), plan.layout.experts
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    row, gate = plan.model.hidden * size, max(WIDE_BYTES, size)
    each = RowBytes(row=row, gate=gate, top_k=experts.top_k)
    tokens = dispatched_tokens(plan) // layout.chunks
    if not part.hops:
        slots, alone = sum(part.by_expert), plan.mesh.ep == 1
        copies = plan.mesh.ep not in (1, experts.num_experts)
        out = [each.padded(slots, gates, alone=alone, copies=copies) for gates in (1, 0)]
        home = [
            each.padded_home(tokens, slots, gates, alone=alone, copies=copies) for gates in (0, 1)
        ]
    elif len(part.hops) == 1:
        out = [each.scatter(part.hops[0], gates) for gates in (1, 0)]
        home = [each.collect(part.hops[0], tokens, gates) for gates in (0, 1)]
    else:
        across, within = part.hops
        out = [each.scatter_twice(across, within, gates) for gates in (1, 0)]
        home = [each.collect_twice((across, within), tokens, gates) for gates in (0, 1)]
    width = experts.ffn // layout.expert_tp
    rows = sum(part.by_expert)
    codes = ExpertProducts.of(plan, width, part.by_expert)
    vectors = _vectors(plan, len(part.by_expert))
    collected = _inner(plan, part.by_expert, backward=True, deferred=True) * width
    together = (rows,) if has_grouped_products(plan) else part.by_expert
    return DispatchChunk(
        dispatch=out[0],
        combine=home[0],
        back=out[1],
        last=home[1],
        rows=rows * row,
        gates=rows * gate,
        inner=rows * width * size,
        forward=_inner(plan, together, backward=False, deferred=True) * width + codes.forward,
        backward=_inner(plan, together, backward=True, deferred=deferred) * width
        + codes.backward
        + (vectors if deferred else _vectors(plan, 1)),
        collected=collected + codes.backward + vectors,
        vectors=vectors,
    )


def _vectors(plan: Plan, held: int) -> int:
    """Return the bytes of the gradients of the biases of so many experts, pieces of them or not."""
    experts, size = experts_of(plan), DTYPE_BYTES[plan.mathematics.precision.parameters]
    each = plan.model.hidden + 2 * experts.ffn // plan.layout.experts.expert_tp
    return experts.bias * held * each * max(WIDE_BYTES, size)


def _inner(plan: Plan, by_expert: tuple[int, ...], *, backward: bool, deferred: bool) -> int:
    """Return the most that experts have inside for a column, one after the other.

    Forward, gate and up are kept; backward, the output again and both gradients where weight
    gradients are put off. A chunk of rows of each is in float32 once; an activation that is one
    kernel has nothing in float32.
    """
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    width = experts_of(plan).ffn // plan.layout.experts.expert_tp
    on_gpu = plan.cluster.backend == "nccl"
    chunk = max(1, (GPU_CHUNK_ELEMENTS if on_gpu else CACHE_ELEMENTS) // (2 * width))
    wide, low_precision = max(WIDE_BYTES, size), size < WIDE_BYTES
    grown = (3 if backward else 2) * size
    fused = plan.layout.kernels.of("swiglu") != "plain"
    numbers = (3 + 3 * low_precision) if backward else (1 + 2 * low_precision)
    if experts_of(plan).limit is not None:
        numbers += _CLAMPED_BACKWARD if backward else _CLAMPED_FORWARD
    once = 0 if fused else wide * numbers
    most = before = 0
    for rows in by_expert:
        most = max(most, (before + rows) * grown + rows * size + min(rows, chunk) * once)
        # Where nothing is put off, what the expert before had lives until this one has its own.
        before = rows + before * deferred
    return most


def _limiting(plan: Plan) -> int:
    """Return what a router has while it finds which assignments experts have room for."""
    if expert_capacity(plan) is None:
        return 0
    mesh, top_k = plan.mesh, experts_of(plan).top_k
    own, ranks = plan.local_tokens // mesh.tp, mesh.tp * mesh.cp
    row = (1 + top_k) * INDEX_BYTES
    gates = top_k * max(WIDE_BYTES, DTYPE_BYTES[plan.mathematics.precision.parameters])
    in_order = 2 * gates if plan.mathematics.balance.drop == "score" else row
    each = row * (ranks > 1) + (2 + top_k) * INDEX_BYTES + in_order + top_k * _CHOICES
    return own * row + own * ranks * each


def _cut(plan: Plan, crossing: BlockPass, load: ExpertLoad) -> Iterator[ExpertLoad]:
    """Yield the load of each chunk."""
    count = plan.layout.experts.chunks
    cut = [np.split(rows, count) for rows in load.choices[crossing]]
    for place in range(count):
        choices = {crossing: tuple(rows[place] for rows in cut)}
        yield ExpertLoad(num_experts=load.num_experts, choices=choices)


def _recorded(plan: Plan, rank: int, crossing: BlockPass, load: ExpertLoad) -> _Part:
    place = expert_index_of(plan, rank)
    between = load.between(crossing)
    held = load.num_experts // len(between)
    by_expert = load.counts(crossing)[:, place * held : (place + 1) * held].sum(0)
    here, leaving = int(between[:, place].sum()), int(between[place].sum())
    counts = tuple(int(rows) for rows in by_expert)
    if plan.layout.experts.dispatch == "flat":
        own, alone = int(between[place, place]), len(between) == 1
        return _Part(
            hops=(HopRows(leaving=leaving, arriving=here, staying=own, alone=alone),),
            by_expert=counts,
        )
    nodes = num_nodes(plan)
    size = len(between) // nodes
    node, member = divmod(place, size)
    reached = [
        load.nodes_reached(rows, nodes).sum(0) for rows in load.choices[crossing][member::size]
    ]
    stays = int(reached[node][node])
    pairs, arrived = int(reached[node].sum()), int(np.stack(reached)[:, node].sum())
    of_node = int(between[member::size, node * size : (node + 1) * size].sum())
    within = int(between[member::size, place].sum())
    hops = (
        HopRows(leaving=pairs, arriving=arrived, staying=stays, alone=nodes == 1),
        HopRows(leaving=of_node, arriving=here, staying=within, alone=size == 1),
    )
    return _Part(hops=hops, by_expert=counts)


def _balanced(plan: Plan) -> tuple[_Part, ...]:
    experts, ep = experts_of(plan), plan.mesh.ep
    kept = rows_at_experts(plan)
    held, nodes = experts.num_experts // ep, num_nodes(plan)
    if plan.layout.experts.dispatch == "flat":
        stays = kept - balanced_rows(plan, ep).leaving
        hops = [(kept, kept, stays, ep == 1)]
    else:
        pairs = even_pairs(plan, nodes)
        own = pairs - balanced_pairs(plan, nodes).leaving * (nodes > 1)
        hops = [(pairs, pairs, own, nodes == 1), (kept, kept, kept * nodes // ep, ep == nodes)]
    chunks = plan.layout.experts.chunks

    def of(whole: int, place: int) -> int:
        return whole * (place + 1) // chunks - whole * place // chunks

    return tuple(
        _Part(
            hops=tuple(
                HopRows(leaving=of(a, one), arriving=of(b, one), staying=of(c, one), alone=alone)
                for a, b, c, alone in hops
            ),
            by_expert=tuple(
                of(kept, one) * (e + 1) // held - of(kept, one) * e // held for e in range(held)
            ),
        )
        for one in range(chunks)
    )


def _padded(plan: Plan) -> tuple[_Part, ...]:
    ep, here = plan.mesh.ep, experts_of(plan).num_experts // plan.mesh.ep
    part = _Part(hops=(), by_expert=(ep * padded_slots(plan),) * here)
    return (part,) * plan.layout.experts.chunks


def _places(plan: Plan, parts: tuple[_Part, ...]) -> int:
    """Return the bytes of what dispatches know of rows."""
    experts, tokens = experts_of(plan), dispatched_tokens(plan)
    if plan.layout.experts.padded:
        rows = sum(sum(one.by_expert) for one in parts)
        return tokens * experts.top_k * INDEX_BYTES + rows * (INDEX_BYTES + 1)
    found = told = 0
    for part in parts:
        rows = tokens // len(parts)
        for hop in part.hops:
            found += _PLACES * hop.leaving + rows
            rows = hop.arriving
    if counted_on_device(plan):
        drops = plan.mathematics.balance.capacity_factor is not None
        told = len(parts) * experts.num_experts * END_BYTES
        told += drops * tokens * experts.top_k  # bytes: a bool of each assignment
    return found * INDEX_BYTES + told
