# SPDX-License-Identifier: Apache-2.0
"""Where each parameter is, as a scope tells it: copies that are kept alike, and pieces.

A variable that is whole in several places is mirrored: ranks update their copies alike, and their
bits stay the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.layout.buckets import plan_buckets, shard_degree
from echelon.layout.stage import held_parameters, part_of, pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Say where one parameter is.

    It is cut into `pieces` (by tensor parallelism) and each of them into `slices` (by ZeRO 3);
    `copies` ranks have the same piece or slice, or replicas on threads have it for a step.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    pieces: int = 1
    slices: int = 1

    @property
    def mirrored(self) -> bool:
        """Return whether each place that has it has all of it, and there are several."""
        return self.copies > 1 and self.pieces == self.slices == 1


def variables_of(plan: Plan) -> tuple[Variable, ...]:
    """Return every parameter of the model of a plan, and where it is."""
    holders: Counter[str] = Counter()
    sliced: set[str] = set()
    for rank in range(plan.mesh.world_size):
        part = part_of(plan, rank)
        holders.update(spec.name for spec in held_parameters(plan, part))
        buckets = plan_buckets(plan, part)
        sliced.update(name for bucket in buckets if bucket.sliced for name in bucket.names)
    found: list[Variable] = []
    for spec in parameters(plan.model):
        pieces = pieces_of(plan, spec) if spec.split_dim is not None else 1
        slices = shard_degree(plan, expert=spec.expert is not None) if spec.name in sliced else 1
        copies = holders[spec.name] // (pieces * slices)
        found.append(
            Variable(name=spec.name, shape=spec.shape, copies=copies, pieces=pieces, slices=slices)
        )
    return tuple(found)
