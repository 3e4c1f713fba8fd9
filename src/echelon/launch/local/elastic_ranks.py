# SPDX-License-Identifier: Apache-2.0
"""Which ranks a job goes on without: islands of local SGD, each as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.launch.context import GroupPlace
from echelon.layout.islands import islands_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRanks:
    """Say which islands a job goes on without, as long as enough of them are there.

    Each has a process group of its own, and every rank is in one: any of them may be lost, so the
    launcher hosts the store, and ranks of all others hear of it. What a rank raises that is no
    error of ours is a loss too, and so is one that hangs.
    """

    num_ranks: int
    """Ranks of all islands together."""
    least: int
    """How many islands must be there: with fewer the job ends."""
    restarts: int
    """How often each island is started again."""
    size: int = 1
    """How many consecutive ranks are an island: all of it is lost with one of them."""

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each island."""
        return tuple(
            tuple(range(start, start + self.size)) for start in range(0, self.num_ranks, self.size)
        )

    def island_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are lost with one of them."""
        return self.islands[rank // self.size]

    def name_of(self, rank: int) -> str:
        """Return what the island of a rank is called: ``island 1 (ranks 2 to 3)``."""
        island = self.island_of(rank)
        ranks = f"rank {rank}" if self.size == 1 else f"ranks {island[0]} to {island[-1]}"
        return f"island {rank // self.size} ({ranks})"


def group_place(
    elastic: ElasticRanks | None, rank: int, world_size: int, attempt: int
) -> GroupPlace:
    """Return the process group that a rank joins: of all ranks, or of its island."""
    if elastic is None:
        return GroupPlace(name="group", rank=rank, world_size=world_size)
    island = elastic.island_of(rank)
    name = f"group/{island[0]}/{attempt}"
    return GroupPlace(name=name, rank=island.index(rank), world_size=len(island))


def elastic_ranks(plan: Plan) -> ElasticRanks | None:
    """Return the islands without which a run of a plan goes on; None of all others."""
    local = plan.mathematics.local_sgd
    if not local.active or local.min_islands == "all":
        return None
    return ElasticRanks(
        num_ranks=plan.mesh.world_size,
        least=local.min_islands,
        restarts=local.restarts,
        size=islands_of(plan)[0].size,
    )
