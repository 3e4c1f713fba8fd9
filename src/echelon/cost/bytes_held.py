"""Bytes that each rank holds between steps, by term: equal to what the run holds.

Parameters, gradients and optimizer state are exact (padding of buckets and of the vocabulary
included). ZeRO paper, section 3.1: mixed or not, Adam keeps two moments beside each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.buckets import plan_buckets
from echelon.cost.stage import stage_of_rank, stage_part

ADAM_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTerm:
    """Say how many bytes of one kind a rank holds."""

    name: str
    bytes: int
    formula: str


def bytes_held(plan: Plan, rank: int) -> tuple[HeldTerm, ...]:
    """Return the model state of `rank` by term."""
    part = stage_part(plan, stage_of_rank(plan, rank))
    elements = sum(bucket.num_elements for bucket in plan_buckets(plan, part))
    precision = plan.mathematics.precision

    def term(name: str, factor: int, dtype: str) -> HeldTerm:
        size = DTYPE_BYTES[dtype]
        formula = f"{factor} x {elements:,} x {size}" if factor > 1 else f"{elements:,} x {size}"
        return HeldTerm(name=name, bytes=factor * elements * size, formula=formula)

    return (
        term("parameters", 1, precision.parameters),
        term("gradients", 1, precision.gradients),
        term("optimizer moments", ADAM_MOMENTS, precision.master),
    )
