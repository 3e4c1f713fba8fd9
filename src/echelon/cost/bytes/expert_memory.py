# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of rows that meet experts: until backward, and while they travel.

Of one block and one microbatch on one rank. It dispatches m rows with k experts each; S of the m k
assignments leave, and A rows meet the experts here (`layout/expert_load.py`). D is the hidden
width, F the inner width of an expert on a rank, s the bytes of an element, g those of a gate. In
bytes:

    until backward      A (D s + g + 2 F s)     rows, gates, and what gate and up made of them
    there, at most      m k + R + A rows        packed, received, put in order by expert
    back, at most       2 A + S + m k rows, m   outputs, in order by rank, received, put together,
                                                and added up by token

A row is D s + g bytes, for backward brings the gradients of gates back beside those of rows.
Padded, A = E P with P slots of each expert on a rank, which sends and gets as many: 3 A rows. In
two hops the second one is as above, of the tokens that are on a node after the first; so is the
first, with a pair of a token and a node for an assignment, and k gates in a row. Chunks are not
taken off.

Balanced, A = m k. At the worst all tokens of the expert group go to one rank: A = n m min(k, E/n),
or what the capacity of its experts lets through. Not counted: numbers of rows (some int64 for each
assignment), and what the products of experts take inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.cost.bytes.expert_sent import gate_bytes
from echelon.cost.bytes.terms import HeldTerm, element_bytes
from echelon.layout.expert_load import (
    balanced_pairs,
    balanced_rows,
    dispatched_tokens,
    expert_capacity,
    experts_of,
    kept_assignments,
    most_nodes,
    num_nodes,
    padded_slots,
    slots_per_expert,
)

KEPT_AT_EXPERTS = "rows kept at experts"
IN_DISPATCH = "rows in dispatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRows:
    """Count the rows of one rank in one exchange, in and out.

    `tokens` are m, `assignments` m k, `here` A; S of them are `leaving` and R of A are `arriving`.
    """

    tokens: int
    assignments: int
    leaving: int
    arriving: int
    at_experts: int

    @property
    def there_rows(self) -> int:
        """Return the rows in memory when the last ones have come to the experts."""
        return self.assignments + self.arriving + self.at_experts

    @property
    def back_rows(self) -> int:
        """Return the rows in memory when the last ones have come back, the added up left out."""
        return 2 * self.at_experts + self.leaving + self.assignments


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMemory:
    """Say what one block and microbatch holds for backward, and at most while rows travel."""

    rows_here: int
    kept: HeldTerm
    in_dispatch: HeldTerm


def balanced_memory(plan: Plan) -> ExpertMemory:
    """Return the memory of a rank if every expert gets as many rows as any other."""
    tokens, here, ep = dispatched_tokens(plan), kept_assignments(plan), plan.mesh.ep
    if ep == 1 or plan.layout.experts.padded:
        return _routing_free_memory(plan)
    if plan.layout.experts.dispatch == "two-hop":
        nodes = num_nodes(plan)
        pairs = balanced_pairs(plan, nodes).leaving
        first = DispatchRows(
            tokens=tokens,
            assignments=tokens + pairs,
            leaving=pairs,
            arriving=pairs,
            at_experts=tokens + pairs,
        )
        return _two_hops(plan, first, _even(plan, first.at_experts, here, ep // nodes))
    dispatched = _even(plan, tokens, here, ep)
    return _memory(plan, here, _peak(plan, dispatched))


def worst_memory(plan: Plan) -> ExpertMemory:
    """Return the memory of a rank to whose experts all tokens of its expert group go."""
    experts, tokens, ep = experts_of(plan), dispatched_tokens(plan), plan.mesh.ep
    if ep == 1 or plan.layout.experts.padded:
        return _routing_free_memory(plan)
    each = min(experts.top_k, experts.num_experts // ep)
    here = ep * tokens * each
    room = expert_capacity(plan)
    if room is not None:
        slots = slots_per_expert(tokens, plan.layout.microbatch_sequences, room)
        here = min(here, experts.num_experts * slots)
    own, assignments = here // ep, tokens * experts.top_k
    if plan.layout.experts.dispatch == "two-hop":
        nodes = num_nodes(plan)
        reached = tokens * most_nodes(experts, nodes)
        first = DispatchRows(
            tokens=tokens,
            assignments=reached,
            leaving=reached - tokens,
            arriving=(nodes - 1) * tokens,
            at_experts=nodes * tokens,
        )
        on_node = first.at_experts * min(experts.top_k, experts.num_experts // nodes)
        second = DispatchRows(
            tokens=first.at_experts,
            assignments=on_node,
            leaving=max(0, on_node - own * nodes),
            arriving=here - own * nodes,
            at_experts=here,
        )
        return _two_hops(plan, first, second)
    dispatched = DispatchRows(
        tokens=tokens,
        assignments=assignments,
        leaving=max(0, assignments - own),
        arriving=here - own,
        at_experts=here,
    )
    return _memory(plan, here, _peak(plan, dispatched))


def rows_in_dispatch(plan: Plan) -> HeldTerm:
    """Return what rows take on their way to experts and back, at most, if loads are balanced."""
    balanced, worst = balanced_memory(plan), worst_memory(plan)
    formula = balanced.in_dispatch.formula
    if worst.rows_here > balanced.rows_here:
        formula += f", balanced; {worst.in_dispatch.bytes:,} if all go to one rank"
    return HeldTerm(name=IN_DISPATCH, bytes=balanced.in_dispatch.bytes, formula=formula)


def _even(plan: Plan, tokens: int, assignments: int, degree: int) -> DispatchRows:
    rows = balanced_rows(plan, degree)
    return DispatchRows(
        tokens=tokens,
        assignments=assignments,
        leaving=rows.leaving,
        arriving=rows.arriving,
        at_experts=assignments,
    )


def _routing_free_memory(plan: Plan) -> ExpertMemory:
    """Return the memory where the routing changes nothing: no rows travel, or always as many."""
    if plan.mesh.ep == 1:
        nothing = HeldTerm(name=IN_DISPATCH, bytes=0, formula="0")
        return _memory(plan, kept_assignments(plan), nothing)
    rows = experts_of(plan).num_experts * padded_slots(plan) * plan.layout.experts.chunks
    # In order by expert, in order by rank, received: what has come back is read where it lies.
    return _memory(plan, rows, _in_dispatch((3 * rows, _row_bytes(plan) + gate_bytes(plan))))


def _in_dispatch(*products: tuple[int, int]) -> HeldTerm:
    """Return the sum of rows times their bytes."""
    text = " + ".join(f"{rows:,} x {size:,}" for rows, size in products)
    return HeldTerm(
        name=IN_DISPATCH, bytes=sum(rows * size for rows, size in products), formula=text
    )


def _two_hops(plan: Plan, first: DispatchRows, second: DispatchRows) -> ExpertMemory:
    row, gate = _row_bytes(plan), gate_bytes(plan)
    wide = row + experts_of(plan).top_k * gate
    phases = (
        _in_dispatch((first.there_rows, wide)),
        _in_dispatch((second.there_rows, row + gate), (first.at_experts, wide)),
        _in_dispatch((second.back_rows, row + gate), (first.at_experts, wide)),
        # Outputs of the experts are still there when what a node made of tokens crosses back.
        _in_dispatch((first.back_rows, wide), (second.at_experts, row + gate), (first.tokens, row)),
    )
    return _memory(plan, second.at_experts, max(phases, key=lambda phase: phase.bytes))


def _peak(plan: Plan, dispatched: DispatchRows) -> HeldTerm:
    row = _row_bytes(plan)
    wide = row + gate_bytes(plan)
    there = _in_dispatch((dispatched.there_rows, wide))
    back = _in_dispatch((dispatched.back_rows, wide), (dispatched.tokens, row))
    return max(there, back, key=lambda phase: phase.bytes)


def _memory(plan: Plan, here: int, in_dispatch: HeldTerm) -> ExpertMemory:
    inner = 2 * experts_of(plan).ffn // plan.layout.experts.expert_tp * element_bytes(plan)
    each = _row_bytes(plan) + gate_bytes(plan) + inner
    return ExpertMemory(
        rows_here=here,
        kept=HeldTerm(name=KEPT_AT_EXPERTS, bytes=here * each, formula=f"{here:,} rows x {each:,}"),
        in_dispatch=in_dispatch,
    )


def _row_bytes(plan: Plan) -> int:
    return plan.model.hidden * element_bytes(plan)
