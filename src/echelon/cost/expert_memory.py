"""What a rank holds of rows that meet experts: until backward, and while they travel.

Of one block and one microbatch on one rank. It dispatches m rows with k experts each; S of the m k
assignments leave, and A rows meet the experts here (`cost/expert_load.py`). D is the hidden width,
F the inner width of an expert on a rank, s the bytes of an element, g those of a gate. In bytes:

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

from echelon.core.model_shape import Experts
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.expert_dispatch import gate_bytes
from echelon.cost.expert_load import (
    balanced_pairs,
    balanced_rows,
    dispatched_tokens,
    kept_assignments,
    most_nodes,
    num_nodes,
)
from echelon.cost.expert_slots import slots_per_expert
from echelon.cost.terms import HeldTerm

KEPT = "rows at experts"
TRAVELLING = "rows on their way to experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """Count the rows of one rank in one exchange, in and out.

    `tokens` are m, `assignments` m k, `here` A; S of them are `leaving` and R of A are `arriving`.
    """

    tokens: int
    assignments: int
    leaving: int
    arriving: int
    here: int

    @property
    def there_rows(self) -> int:
        """Return the rows in memory when the last ones have come to the experts."""
        return self.assignments + self.arriving + self.here

    @property
    def back_rows(self) -> int:
        """Return the rows in memory when the last ones have come back, the added up left out."""
        return 2 * self.here + self.leaving + self.assignments


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMemory:
    """Say what one block and microbatch holds for backward, and at most while rows travel."""

    rows_here: int
    kept: HeldTerm
    travelling: HeldTerm


def balanced_memory(plan: Plan) -> ExpertMemory:
    """Return the memory of a rank if every expert gets as many rows as any other."""
    tokens, here, ep = dispatched_tokens(plan), kept_assignments(plan), plan.mesh.ep
    if ep == 1 or plan.layout.experts.padded:
        return _of_one_kind(plan)
    if plan.layout.experts.dispatch == "two-hop":
        nodes = num_nodes(plan)
        pairs = balanced_pairs(plan, nodes).leaving
        first = Travel(
            tokens=tokens,
            assignments=tokens + pairs,
            leaving=pairs,
            arriving=pairs,
            here=tokens + pairs,
        )
        return _two_hops(plan, first, _even(plan, first.here, here, ep // nodes))
    travel = _even(plan, tokens, here, ep)
    return _memory(plan, here, _peak(plan, travel))


def worst_memory(plan: Plan) -> ExpertMemory:
    """Return the memory of a rank to whose experts all tokens of its expert group go."""
    experts, tokens, ep = _experts(plan), dispatched_tokens(plan), plan.mesh.ep
    if ep == 1 or plan.layout.experts.padded:
        return _of_one_kind(plan)
    each = min(experts.top_k, experts.num_experts // ep)
    here = ep * tokens * each
    slots = _slots(plan, tokens)
    if slots is not None:
        here = min(here, experts.num_experts * slots)
    own, assignments = here // ep, tokens * experts.top_k
    if plan.layout.experts.dispatch == "two-hop":
        nodes = num_nodes(plan)
        reached = tokens * most_nodes(experts, nodes)
        first = Travel(
            tokens=tokens,
            assignments=reached,
            leaving=reached - tokens,
            arriving=(nodes - 1) * tokens,
            here=nodes * tokens,
        )
        on_node = first.here * min(experts.top_k, experts.num_experts // nodes)
        second = Travel(
            tokens=first.here,
            assignments=on_node,
            leaving=max(0, on_node - own * nodes),
            arriving=here - own * nodes,
            here=here,
        )
        return _two_hops(plan, first, second)
    travel = Travel(
        tokens=tokens,
        assignments=assignments,
        leaving=max(0, assignments - own),
        arriving=here - own,
        here=here,
    )
    return _memory(plan, here, _peak(plan, travel))


def travelling_rows(plan: Plan) -> HeldTerm:
    """Return what rows take on their way to experts and back, at most, if loads are balanced."""
    balanced, worst = balanced_memory(plan), worst_memory(plan)
    formula = balanced.travelling.formula
    if worst.rows_here > balanced.rows_here:
        formula += f", balanced; {worst.travelling.bytes:,} if all go to one rank"
    return HeldTerm(name=TRAVELLING, bytes=balanced.travelling.bytes, formula=formula)


def _even(plan: Plan, tokens: int, assignments: int, degree: int) -> Travel:
    rows = balanced_rows(plan, degree)
    return Travel(
        tokens=tokens,
        assignments=assignments,
        leaving=rows.leaving,
        arriving=rows.arriving,
        here=assignments,
    )


def _of_one_kind(plan: Plan) -> ExpertMemory:
    """Return the memory where the routing changes nothing: no rows travel, or always as many."""
    tokens, chunks = dispatched_tokens(plan), plan.layout.experts.chunks
    if plan.mesh.ep == 1:
        return _memory(plan, kept_assignments(plan), _Bytes(0, "0"))
    slots = _slots(plan, tokens // chunks)
    assert slots is not None, "without a capacity there is no size to pad to"
    rows = _experts(plan).num_experts * slots * chunks
    # In order by expert, in order by rank, received: what has come back is read where it lies.
    return _memory(plan, rows, _Bytes.of((3 * rows, _row_bytes(plan) + gate_bytes(plan))))


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Give bytes, and the multiplications that they come from."""

    bytes: int
    formula: str

    @classmethod
    def of(cls, *products: tuple[int, int]) -> _Bytes:
        """Return the sum of rows times their bytes."""
        text = " + ".join(f"{rows:,} x {size:,}" for rows, size in products)
        return cls(sum(rows * size for rows, size in products), text)


def _two_hops(plan: Plan, first: Travel, second: Travel) -> ExpertMemory:
    row, gate = _row_bytes(plan), gate_bytes(plan)
    wide = row + _experts(plan).top_k * gate
    phases = (
        _Bytes.of((first.there_rows, wide)),
        _Bytes.of((second.there_rows, row + gate), (first.here, wide)),
        _Bytes.of((second.back_rows, row + gate), (first.here, wide)),
        # Outputs of the experts are still there when what a node made of tokens crosses back.
        _Bytes.of((first.back_rows, wide), (second.here, row + gate), (first.tokens, row)),
    )
    return _memory(plan, second.here, max(phases, key=lambda phase: phase.bytes))


def _peak(plan: Plan, travel: Travel) -> _Bytes:
    row = _row_bytes(plan)
    wide = row + gate_bytes(plan)
    there = _Bytes.of((travel.there_rows, wide))
    back = _Bytes.of((travel.back_rows, wide), (travel.tokens, row))
    return max(there, back, key=lambda phase: phase.bytes)


def _memory(plan: Plan, here: int, travelling: _Bytes) -> ExpertMemory:
    inner = 2 * _experts(plan).ffn // plan.layout.experts.expert_tp * _size(plan)
    each = _row_bytes(plan) + gate_bytes(plan) + inner
    return ExpertMemory(
        rows_here=here,
        kept=HeldTerm(name=KEPT, bytes=here * each, formula=f"{here:,} rows x {each:,}"),
        travelling=HeldTerm(name=TRAVELLING, bytes=travelling.bytes, formula=travelling.formula),
    )


def _slots(plan: Plan, num_tokens: int) -> int | None:
    """Return how many of a rank's tokens one expert has room for; None where there is no end."""
    experts, balance = _experts(plan), plan.mathematics.balance
    length = plan.mathematics.sequence_length
    room = balance.capacity(length, experts.num_experts, experts.top_k)
    if room is None:
        return None
    return slots_per_expert(num_tokens, plan.layout.microbatch_sequences, room)


def _row_bytes(plan: Plan) -> int:
    return plan.model.hidden * _size(plan)


def _size(plan: Plan) -> int:
    return DTYPE_BYTES[plan.mathematics.precision.parameters]


def _experts(plan: Plan) -> Experts:
    assert plan.model.experts is not None, "a dense model sends nothing to experts"
    return plan.model.experts
