"""Which ranks of a plan do the same, so that one of each class is rehearsed.

What a rank gives its communicators follows from its stages, from its place among context ranks
where its positions need other blocks of keys than theirs, where matrices have owners (Muon) from
what it owns, and where sums are made of messages from its place among data ranks. Ranks that differ
in their other coordinates only do the same with other samples, other columns or other slices of as
many elements. `checked` names some of those, whose logs are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from echelon.core.axis import Axis
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import Plan
from echelon.rehearsal.order import RankClass

EVERY_RANK = 16
"""Up to so many ranks each is a class of its own."""

CHECKED_RANKS = 4
"""Ranks that are rehearsed beside their class, to compare."""


class RankClasses:
    """Know the class of each rank of a plan."""

    def __init__(self, plan: Plan, *, by_context: bool = True) -> None:
        """Look at what tells the ranks of `plan` apart; `by_context`: context ranks, too."""
        self._mesh, self._by_context = plan.mesh, by_context
        owners = OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices
        # What a rank sends of a sum that is made of messages depends on its place.
        messages = plan.layout.collectives.algorithm != BACKEND
        self._each = owners or messages or plan.mesh.world_size <= EVERY_RANK

    def of(self, rank: int) -> RankClass:
        """Return the class of a rank."""
        if self._each:
            return (rank,)
        place = self._mesh.coordinates(rank)
        return (place[Axis.PP], place[Axis.CP]) if self._by_context else (place[Axis.PP],)

    def first_ranks(self) -> list[int]:
        """Return the first rank of each class, in order."""
        found: dict[RankClass, int] = {}
        for rank in range(self._mesh.world_size):
            found.setdefault(self.of(rank), rank)
        return list(found.values())

    def context_ranks(self) -> list[int]:
        """Return the ranks that differ from rank 0 in the context only; none in small worlds."""
        if self._each or self._mesh.cp == 1:
            return []
        return [self._mesh.rank({Axis.CP: place}) for place in range(self._mesh.cp)]

    def checked(self, seed: int = 0) -> Sequence[int]:
        """Return ranks that are not the first of their class: the last one, and some at random."""
        others = sorted(set(range(self._mesh.world_size)) - set(self.first_ranks()))
        if len(others) <= CHECKED_RANKS:
            return others
        return sorted([others[-1], *Random(seed).sample(others[:-1], CHECKED_RANKS - 1)])
