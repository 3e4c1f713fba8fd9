"""The numbers of a mixture of experts on a rank: balanced, or those of a recorded routing."""

from __future__ import annotations

import numpy as np

from echelon.core.plan import Plan
from echelon.cost.activation_numbers import INDEX_BYTES
from echelon.cost.activations_experts import ExpertNumbers
from echelon.cost.expert_load import (
    Crossing,
    ExpertLoad,
    balanced_pairs,
    dispatched_tokens,
    kept_assignments,
    num_nodes,
)
from echelon.cost.expert_slots import slots_per_expert
from echelon.cost.stage import expert_index_of

_PLACES = 3
"""int64 of an assignment: its slot, its token, and its place in the order of tokens."""


def expert_numbers(
    plan: Plan, rank: int, crossing: Crossing | None = None, load: ExpertLoad | None = None
) -> ExpertNumbers:
    """Return the numbers of one microbatch in one block: of a record where there is one."""
    experts, balance, tp = plan.model.experts, plan.mathematics.balance, plan.mesh.tp
    assert experts is not None, "a dense model has no experts"
    here, places, spare = _rows(plan, rank, crossing, load)
    return ExpertNumbers(
        routed=plan.local_tokens // tp,
        experts=experts.num_experts,
        top_k=experts.top_k,
        here=here,
        inner=experts.ffn // plan.layout.experts.expert_tp,
        shared_inner=experts.ffn * experts.shared_experts // tp,
        places=places,
        spare=spare,
        renormalised=int(experts.renormalise),
        sigmoid=int(experts.router == "sigmoid"),
        auxiliary=int(balance.has_aux),
        by_sequence=int(balance.aux_over != "global"),
        z_loss=int(balance.z_coefficient > 0.0),
    )


def _rows(
    plan: Plan, rank: int, crossing: Crossing | None, load: ExpertLoad | None
) -> tuple[int, int, int]:
    """Return the rows at the experts here, the bytes of their places, and rows to spare."""
    if plan.layout.experts.padded:
        return _padded(plan)
    if load is None or crossing is None:
        return _balanced(plan)
    place = expert_index_of(plan, rank)
    between = load.between(crossing)
    here, leaving = int(between[:, place].sum()), int(between[place].sum())
    tokens, chunks = dispatched_tokens(plan), plan.layout.experts.chunks
    if plan.layout.experts.dispatch == "flat":
        return here, _flat_places(leaving, tokens, load.num_experts * chunks), 0
    nodes = num_nodes(plan)
    size = len(between) // nodes
    node, member = divmod(place, size)
    reached = [
        load.nodes_reached(rows, nodes).sum(0) for rows in load.choices[crossing][member::size]
    ]
    pairs, arrived = int(reached[node].sum()), int(np.stack(reached)[:, node].sum())
    of_node = int(between[member::size, node * size : (node + 1) * size].sum())
    first = _flat_places(pairs, tokens, nodes * chunks)
    return here, first + _flat_places(of_node, arrived, load.num_experts // nodes * chunks), 0


def _balanced(plan: Plan) -> tuple[int, int, int]:
    experts, chunks = plan.model.experts, plan.layout.experts.chunks
    assert experts is not None
    kept, tokens = kept_assignments(plan), dispatched_tokens(plan)
    if plan.layout.experts.dispatch == "flat":
        return kept, _flat_places(kept, tokens, experts.num_experts * chunks), 0
    nodes = num_nodes(plan)
    pairs = tokens + balanced_pairs(plan, nodes).leaving
    first = _flat_places(pairs, tokens, nodes * chunks)
    return kept, first + _flat_places(kept, pairs, experts.num_experts // nodes * chunks), 0


def _flat_places(assignments: int, tokens: int, experts: int) -> int:
    return INDEX_BYTES * (_PLACES * assignments + tokens + experts)


def _padded(plan: Plan) -> tuple[int, int, int]:
    experts, ep, chunks = plan.model.experts, plan.mesh.ep, plan.layout.experts.chunks
    assert experts is not None
    length = plan.mathematics.sequence_length
    room = plan.mathematics.balance.capacity(length, experts.num_experts, experts.top_k)
    assert room is not None, "without a capacity there is no size to pad to"
    tokens = dispatched_tokens(plan)
    slots = slots_per_expert(tokens // chunks, plan.layout.microbatch_sequences, room)
    rows = experts.num_experts * slots * chunks
    places = tokens * experts.top_k * INDEX_BYTES + rows * (INDEX_BYTES + 1)
    # What came is put in order by a copy, but where there is one way to order it.
    return rows, places, chunks * int(ep in (1, experts.num_experts))
