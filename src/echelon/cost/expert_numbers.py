"""The numbers of a mixture of experts on a rank: balanced, or those of a recorded routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activation_numbers import INDEX_BYTES, WIDE_BYTES
from echelon.cost.activations_experts import ExpertNumbers
from echelon.cost.expert_load import (
    Crossing,
    ExpertLoad,
    balanced_pairs,
    balanced_rows,
    dispatched_tokens,
    kept_assignments,
    num_nodes,
)
from echelon.cost.expert_slots import slots_per_expert
from echelon.cost.stage import expert_index_of

_PLACES = 3
"""int64 of an assignment: its slot, its token, and its place in the order of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Count the rows of a mixture on a rank, in the words of `ExpertNumbers`.

    `by_expert` are those that each expert here gets, in order.
    """

    flying: int
    arriving: int
    returned: int
    back: int
    homing: int
    again: int
    places: int
    by_expert: tuple[int, ...]
    spare: int = 0

    @property
    def here(self) -> int:
        """Return the rows of all experts here."""
        return sum(self.by_expert)


def expert_numbers(
    plan: Plan, rank: int, crossing: Crossing | None = None, load: ExpertLoad | None = None
) -> ExpertNumbers:
    """Return the numbers of one microbatch in one block: of a record where there is one."""
    experts, balance, tp = plan.model.experts, plan.mathematics.balance, plan.mesh.tp
    assert experts is not None, "a dense model has no experts"
    layout = plan.layout.experts
    if layout.padded:
        rows = _padded(plan)
    elif load is None or crossing is None:
        rows = _balanced(plan)
    else:
        rows = _recorded(plan, rank, crossing, load)
    inner = experts.ffn // layout.expert_tp
    apart = plan.mesh.ep > 1 or layout.padded
    put_off = apart or tp > 1
    return ExpertNumbers(
        routed=plan.local_tokens // tp,
        experts=experts.num_experts,
        top_k=experts.top_k,
        here=rows.here,
        inner=inner,
        shared_inner=experts.ffn * experts.shared_experts // tp,
        places=rows.places,
        spare=rows.spare,
        renormalised=int(experts.renormalise),
        sigmoid=int(experts.router == "sigmoid"),
        auxiliary=int(balance.has_aux),
        by_sequence=int(balance.aux_over != "global"),
        z_loss=int(balance.z_coefficient > 0.0),
        dispatched=dispatched_tokens(plan),
        flying=rows.flying,
        arriving=rows.arriving if apart else 0,
        scattered=rows.arriving if apart else rows.flying,
        returned=rows.returned if apart else 0,
        back=rows.back if apart else rows.here,
        homing=rows.homing if apart else 0,
        again=rows.again if apart else 0,
        apart=int(apart),
        chunks=layout.chunks,
        inner_forward=_inner(plan, rows.by_expert, inner, backward=False, put_off=True),
        inner_backward=_inner(plan, rows.by_expert, inner, backward=True, put_off=put_off),
        pieces=int(layout.expert_tp > 1),
    )


def _inner(
    plan: Plan, by_expert: tuple[int, ...], width: int, *, backward: bool, put_off: bool
) -> int:
    """Return the most that experts have inside, one after the other, each in float32 once.

    Forward, gate and up are kept; backward, the output again and both gradients where weight
    gradients are put off.
    """
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    wide, narrow = max(WIDE_BYTES, size), size < WIDE_BYTES
    grown = (3 if backward else 2) * size
    once = size + wide * ((3 + 3 * narrow) if backward else (1 + 2 * narrow))
    most = before = 0
    for every in by_expert:
        rows = -(-every // plan.layout.experts.chunks)
        most = max(most, (before + rows) * grown + rows * once)
        before += rows if put_off else 0
    return most * width


def _recorded(plan: Plan, rank: int, crossing: Crossing, load: ExpertLoad) -> _Rows:
    place = expert_index_of(plan, rank)
    between = load.between(crossing)
    held = load.num_experts // len(between)
    by_expert = load.counts(crossing)[:, place * held : (place + 1) * held].sum(0)
    here, leaving = int(between[:, place].sum()), int(between[place].sum())
    own = int(between[place, place])
    tokens, chunks = dispatched_tokens(plan), plan.layout.experts.chunks
    counts = tuple(int(rows) for rows in by_expert)
    if plan.layout.experts.dispatch == "flat":
        places = _flat_places(leaving, tokens, load.num_experts * chunks)
        return _flat(leaving, leaving - own, here - own, places, counts, chunks)
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
    places = _flat_places(pairs, tokens, nodes * chunks)
    places += _flat_places(of_node, arrived, load.num_experts // nodes * chunks)
    hops = (_Hop(pairs, arrived, stays), _Hop(of_node, here, within))
    return _two_hops(hops, places, counts)


@dataclass(frozen=True, slots=True)
class _Hop:
    """Count the rows that a hop takes from here, that it brings here, and that stay."""

    leaving: int
    here: int
    stays: int


def _flat(
    leaving: int, away: int, came: int, places: int, by_expert: tuple[int, ...], chunks: int
) -> _Rows:
    here = sum(by_expert)
    return _Rows(
        flying=leaving + came,
        arriving=leaving + came,
        returned=here + away + leaving // chunks,
        back=here + away,
        homing=here + away,
        again=leaving,
        places=places,
        by_expert=by_expert,
    )


def _two_hops(hops: tuple[_Hop, _Hop], places: int, by_expert: tuple[int, ...]) -> _Rows:
    """Return the rows where what crossed nodes is put in order, and goes on from there."""
    across, within = hops
    crossing = across.leaving + across.here - across.stays
    home = across.here + across.leaving - across.stays
    within_home = 2 * within.leaving - within.stays + within.here + across.here
    return _Rows(
        flying=crossing,
        arriving=crossing + across.here + within.leaving + within.here - within.stays,
        returned=max(within_home, home + across.leaving),
        back=home,
        homing=within_home,
        again=across.leaving,
        places=places,
        by_expert=by_expert,
    )


def _balanced(plan: Plan) -> _Rows:
    experts, chunks, ep = plan.model.experts, plan.layout.experts.chunks, plan.mesh.ep
    assert experts is not None
    kept, tokens = kept_assignments(plan), dispatched_tokens(plan)
    held = experts.num_experts // ep
    by_expert = tuple(kept * (e + 1) // held - kept * e // held for e in range(held))
    if plan.layout.experts.dispatch == "flat":
        places = _flat_places(kept, tokens, experts.num_experts * chunks)
        moving = balanced_rows(plan, ep).leaving
        return _flat(kept, moving, moving, places, by_expert, chunks)
    nodes = num_nodes(plan)
    moving = balanced_pairs(plan, nodes).leaving
    pairs = tokens + moving
    places = _flat_places(pairs, tokens, nodes * chunks)
    places += _flat_places(kept, pairs, experts.num_experts // nodes * chunks)
    hops = (_Hop(pairs, pairs, tokens), _Hop(kept, kept, kept * nodes // ep))
    return _two_hops(hops, places, by_expert)


def _flat_places(assignments: int, tokens: int, experts: int) -> int:
    return INDEX_BYTES * (_PLACES * assignments + tokens + experts)


def _padded(plan: Plan) -> _Rows:
    experts, ep, chunks = plan.model.experts, plan.mesh.ep, plan.layout.experts.chunks
    assert experts is not None
    length = plan.mathematics.sequence_length
    room = plan.mathematics.balance.capacity(length, experts.num_experts, experts.top_k)
    assert room is not None, "without a capacity there is no size to pad to"
    tokens = dispatched_tokens(plan)
    slots = slots_per_expert(tokens // chunks, plan.layout.microbatch_sequences, room)
    rows, held = experts.num_experts * slots * chunks, experts.num_experts // ep
    return _Rows(
        flying=2 * rows,
        arriving=2 * rows,
        returned=2 * rows,
        back=2 * rows,
        homing=2 * rows,
        again=0,
        places=tokens * experts.top_k * INDEX_BYTES + rows * (INDEX_BYTES + 1),
        by_expert=(rows // held,) * held,
        # What came is put in order by a copy, but where there is one way to order it.
        spare=chunks * int(ep in (1, experts.num_experts)),
    )
