"""The sizes of what attention of one block works with on a context rank, and terms of them."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.context import kv_copies, kv_row_elements
from echelon.cost.terms import HeldTerm

LEAST_WIDE_BYTES = 4
"""What is added up from several pieces is in at least fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Hold what is there at one time, term by term."""

    name: str
    terms: tuple[HeldTerm, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    @property
    def formula(self) -> str:
        """Return the formulas of all terms."""
        return " + ".join(term.formula for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Count the elements of what one block's attention works with, and the bytes of each."""

    out: int
    keys: int
    lse: int
    rows: int
    row: int
    places: int
    sequences: int
    copied: int
    narrow: int
    wide: int

    @classmethod
    def of(cls, plan: Plan) -> Sizes:
        """Return the sizes of a plan; `row` is one of keys and values, `rows` those of a place."""
        model, tp, cp = plan.model, plan.mesh.tp, plan.mesh.cp
        heads, kv_heads = model.heads // tp, model.kv_heads // tp
        degree, places = plan.layout.context.ulysses_degree, plan.placement.ring_degree
        rows, row = plan.mathematics.sequence_length // places, kv_row_elements(plan)
        narrow = DTYPE_BYTES[plan.mathematics.precision.parameters]
        copies = kv_copies(heads, kv_heads, degree)
        assert cp == degree * places
        return cls(
            out=plan.local_tokens * heads * model.head_dim,
            keys=rows * row,
            lse=plan.local_tokens * heads,
            rows=rows,
            row=row,
            places=places,
            sequences=plan.layout.microbatch_sequences,
            copied=copies if copies > 1 else 0,
            narrow=narrow,
            wide=max(LEAST_WIDE_BYTES, narrow),
        )

    @property
    def is_narrow(self) -> bool:
        """Return whether sums are wider than what is summed."""
        return self.wide > self.narrow


def term(name: str, size: int, formula: str) -> HeldTerm:
    """Return a term of so many bytes."""
    return HeldTerm(name=name, bytes=size, formula=formula)


def wide(name: str, elements: int, sizes: Sizes, formula: str) -> HeldTerm:
    """Return a term of elements that are added up in at least fp32."""
    return HeldTerm(name=name, bytes=elements * sizes.wide, formula=formula)
