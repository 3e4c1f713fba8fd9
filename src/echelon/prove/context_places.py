"""Which context rank holds each position, as tensors over the positions of a sequence.

Shape suffixes: T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.placement import Placement
from echelon.core.plan import Plan
from echelon.cost.context import kv_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlaces:
    """Say of each position where it lies: on which ring place, in which run, on which rank.

    `row_T` counts the rows of a ring place, `local_T` those of a context rank, `index_T` those of
    a run; `step_T` is the step of the run.
    """

    placement: Placement
    place_T: torch.Tensor
    row_T: torch.Tensor
    run_T: torch.Tensor
    index_T: torch.Tensor
    step_T: torch.Tensor
    rank_T: torch.Tensor
    local_T: torch.Tensor

    @property
    def contiguous_T(self) -> torch.Tensor:
        """Return the position that each would have if every rank held one contiguous chunk."""
        return self.rank_T * (self.placement.length // self.placement.degree) + self.local_T

    def moved(self, shift: int) -> torch.Tensor:
        """Return for each position the one in the same row of the ring place `shift` further."""
        return self._at_rows(self.place_T, self.row_T, self.placement.ring_degree, shift)

    def moved_ranks(self, shift: int) -> torch.Tensor:
        """Return for each position the one in the same row of the context rank `shift` further."""
        return self._at_rows(self.rank_T, self.local_T, self.placement.degree, shift)

    def _at_rows(
        self, owner_T: torch.Tensor, row_T: torch.Tensor, degree: int, shift: int
    ) -> torch.Tensor:
        size = self.placement.length // degree
        key_T = owner_T * size + row_T
        at_T = torch.empty_like(key_T)
        at_T[key_T] = torch.arange(self.placement.length)
        return at_T[(owner_T + shift) % degree * size + row_T]


def context_places(placement: Placement) -> ContextPlaces:
    """Return where the positions of a sequence lie."""
    names = ("place_T", "row_T", "run_T", "index_T", "step_T", "rank_T", "local_T")
    found = {name: torch.zeros(placement.length, dtype=torch.int64) for name in names}
    number = 0
    for place in range(placement.ring_degree):
        row = 0
        for run in placement.ring_runs(place):
            for index in range(run.count):
                position = run.position(index)
                values = (place, row, number, index, run.step)
                for name, value in zip(names[:5], values, strict=True):
                    found[name][position] = value
                row += 1
            number += 1
    for rank in range(placement.degree):
        for local, position in enumerate(placement.positions(rank)):
            found["rank_T"][position], found["local_T"][position] = rank, local
    return ContextPlaces(placement=placement, **found)


def heads_of_member(plan: Plan, member: int) -> list[int]:
    """Return the query heads that one member of each Ulysses group attends with."""
    own = plan.model.heads // plan.mesh.tp
    few = own // plan.layout.context.ulysses_degree
    return [tp * own + member * few + i for tp in range(plan.mesh.tp) for i in range(few)]


def copies_of(plan: Plan) -> int:
    """Return to how many members of a Ulysses group each key/value head is sent."""
    tp, degree = plan.mesh.tp, plan.layout.context.ulysses_degree
    return kv_copies(plan.model.heads // tp, max(1, plan.model.kv_heads // tp), degree)
