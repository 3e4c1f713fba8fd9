# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a plan do the same, so that one of each class is rehearsed.

What a rank gives its communicators follows from its stages, and from its place among context ranks
where its positions need other blocks of keys than theirs. Ranks that differ in their other
coordinates only do the same with other samples, other columns or other slices of as many elements.
`checked` names some of those, whose logs are compared.

Where matrices have owners (Muon), a rank has the memory and the kernels of what it owns. Its log is
that of the others: one exchange for each bucket and direction, of any sizes, whoever owns what. So
the rank that owns most stands for its class, and the one that owns least is among those compared.

Where sums are made of messages, what a rank sends depends on its place among data ranks: each is
rehearsed. So is each parameter server: ranges of buckets may differ by an element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from random import Random

from echelon.core.axis import Axis
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import Plan
from echelon.layout.islands import inner_plan, islands_of
from echelon.layout.muon import muon_exchange
from echelon.layout.stage import expert_index_of, pp_rank_of
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
        # What a rank sends of a sum that is made of messages depends on its place.
        messages = plan.layout.collectives.algorithm != BACKEND
        self._each = messages or plan.mesh.world_size <= EVERY_RANK
        self._owned = Counter[int]() if self._each else owned_elements(plan)

    def of(self, rank: int) -> RankClass:
        """Return the class of a rank."""
        if self._each or self._mesh.is_server(rank):
            return (rank,)
        place = self._mesh.coordinates(rank)
        return (place[Axis.PP], place[Axis.CP]) if self._by_context else (place[Axis.PP],)

    def first_ranks(self) -> list[int]:
        """Return the rank of each class that owns most, in the order of classes; or its first."""
        found: dict[RankClass, int] = {}
        for rank in range(self._mesh.world_size):
            known = found.setdefault(self.of(rank), rank)
            if self._owned[rank] > self._owned[known]:
                found[self.of(rank)] = rank
        return list(found.values())

    def context_ranks(self) -> list[int]:
        """Return the ranks that differ from rank 0 in the context only; none in small worlds."""
        if self._each or self._mesh.cp == 1:
            return []
        return [self._mesh.rank({Axis.CP: place}) for place in range(self._mesh.cp)]

    def checked(self, seed: int = 0) -> Sequence[int]:
        """Return ranks that do not stand for their class: the last one, some at random, and where
        matrices have owners the one that owns least."""
        others = sorted(set(range(self._mesh.world_size)) - set(self.first_ranks()))
        if len(others) <= CHECKED_RANKS:
            return others
        least = [min(others, key=lambda rank: self._owned[rank])] if self._owned else []
        found = {others[-1], *least}
        rest = [one for one in others if one not in found]
        return sorted([*found, *Random(seed).sample(rest, CHECKED_RANKS - len(found))])


def owned_elements(plan: Plan) -> Counter[int]:
    """Return the elements of the matrices that each rank owns; none without owners."""
    found = Counter[int]()
    if not OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices:
        return found
    if islands := islands_of(plan):
        owned = owned_elements(inner_plan(plan))
        return Counter({one.first_rank + rank: n for one in islands for rank, n in owned.items()})
    ranks = range(plan.mesh.world_size)
    places = {rank: (pp_rank_of(plan, rank), expert_index_of(plan, rank)) for rank in ranks}
    # All shares of the experts have the same other matrices, with the same owners.
    for place in {*places.values()}:
        owned = Counter[int]()
        for one in muon_exchange(plan, *place).matrices:
            owned[one.owner] += prod(one.shape)
        found |= {rank: owned[rank] for rank in ranks if places[rank] == place}
    return found
