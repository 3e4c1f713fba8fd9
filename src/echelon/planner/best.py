"""The best plans met so far: one for each mesh with its microbatch and schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from echelon.core.mesh import Mesh
from echelon.cost.lattice.numbers import Array
from echelon.planner.choice import Choice
from echelon.planner.choices import Order, Shares
from echelon.planner.lattice import Columns
from echelon.planner.pins import CONTEXT_KINDS

FINALISTS = 50

Group = tuple[int, int, int, int]
"""Devices, the row of a mesh, a schedule and its virtual stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """Hold a plan that fits: what it is worth (less is better), and where its numbers stand."""

    value: float
    columns: Columns
    row: int
    shares: Shares
    order: Order
    recompute: tuple[int, float]

    def choice(self) -> Choice:
        """Return the plan as whole numbers."""
        row = {name: int(column[self.row]) for name, column in self.columns.items()}
        shares, (every, share) = self.shares, self.recompute
        return Choice(
            mesh=Mesh(
                pp=row["pp"],
                dp_replicate=shares.dp_replicate,
                dp_shard=shares.dp_shard,
                cp=row["cp"],
                tp=row["tp"],
                ep=row["ep"],
            ),
            sequence_parallel=bool(row["sequence_parallel"]),
            context=CONTEXT_KINDS[row["kind"]],
            ulysses=row["ulysses"],
            expert_tp=row["expert_tp"],
            microbatch=row["microbatch"],
            microbatches=row["microbatches"],
            zero=shares.zero,
            reshard=bool(shares.reshard),
            offload=bool(shares.offload),
            schedule=self.order.name,
            virtual=self.order.virtual,
            recompute=every,
            recomputed_share=share,
        )


@dataclass(slots=True)
class Best:
    """Keep the best plan of each group, and say what a plan must beat to be among the first."""

    keep: int = FINALISTS
    found: dict[Group, Entrant] = field(default_factory=dict[Group, Entrant])
    threshold: float = inf

    def add(self, group: Group, entrant: Entrant) -> None:
        """Take a plan where it beats the one of its group."""
        known = self.found.get(group)
        if known is None or entrant.value < known.value:
            self.found[group] = entrant

    def settle(self) -> None:
        """Drop what is not among the first, and raise the bar."""
        if len(self.found) < self.keep:
            return
        ranked = sorted(self.found.items(), key=lambda item: item[1].value)[: self.keep]
        self.found = dict(ranked)
        self.threshold = ranked[-1][1].value

    def ranked(self) -> list[Entrant]:
        """Return the plans kept, best first."""
        return sorted(self.found.values(), key=lambda entrant: entrant.value)[: self.keep]


def first_of_groups(values: Array, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the least value of each group stands."""
    order = np.lexsort((values, groups))
    ordered = groups[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first]
