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

    leaving: int
    away: int
    came: int
    places: int
    by_expert: tuple[int, ...]
    spare: int = 0
    joined: int = 1

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
        leaving=rows.leaving,
        away=rows.away,
        came=rows.came,
        apart=int(apart),
        joined=int(rows.joined and apart),
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
    here, leaving, own = (
        int(between[:, place].sum()),
        int(between[place].sum()),
        int(between[place, place]),
    )
    tokens, chunks = dispatched_tokens(plan), plan.layout.experts.chunks
    if plan.layout.experts.dispatch == "flat":
        places = _flat_places(leaving, tokens, load.num_experts * chunks)
        found = (leaving, leaving - own, here - own)
    else:
        nodes = num_nodes(plan)
        size = len(between) // nodes
        node, member = divmod(place, size)
        reached = [
            load.nodes_reached(rows, nodes).sum(0) for rows in load.choices[crossing][member::size]
        ]
        pairs, arrived = int(reached[node].sum()), int(np.stack(reached)[:, node].sum())
        of_node = int(between[member::size, node * size : (node + 1) * size].sum())
        places = _flat_places(pairs, tokens, nodes * chunks)
        places += _flat_places(of_node, arrived, load.num_experts // nodes * chunks)
        # What crossed nodes, put in order there, and what goes on from there.
        crossed = arrived - int(reached[node][node])
        within = int(between[member::size, place].sum())
        found = (
            pairs + crossed + arrived + of_node,
            pairs - int(reached[node][node]) + of_node - within,
            here - within,
        )
    return _Rows(
        leaving=found[0],
        away=found[1],
        came=found[2],
        places=places,
        by_expert=tuple(int(rows) for rows in by_expert),
    )


def _balanced(plan: Plan) -> _Rows:
    experts, chunks, ep = plan.model.experts, plan.layout.experts.chunks, plan.mesh.ep
    assert experts is not None
    kept, tokens = kept_assignments(plan), dispatched_tokens(plan)
    held = experts.num_experts // ep
    moving = balanced_rows(plan, ep).leaving
    leaving = kept
    if plan.layout.experts.dispatch == "flat":
        places = _flat_places(kept, tokens, experts.num_experts * chunks)
    else:
        nodes = num_nodes(plan)
        pairs = tokens + balanced_pairs(plan, nodes).leaving
        places = _flat_places(pairs, tokens, nodes * chunks)
        places += _flat_places(kept, pairs, experts.num_experts // nodes * chunks)
        leaving += 2 * pairs
    return _Rows(
        leaving=leaving,
        away=moving,
        came=moving,
        places=places,
        by_expert=tuple(kept * (e + 1) // held - kept * e // held for e in range(held)),
    )


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
        leaving=rows,
        away=rows,
        came=rows,
        places=tokens * experts.top_k * INDEX_BYTES + rows * (INDEX_BYTES + 1),
        by_expert=(rows // held,) * held,
        # What came is put in order by a copy, but where there is one way to order it.
        spare=chunks * int(ep in (1, experts.num_experts)),
        joined=0,
    )
