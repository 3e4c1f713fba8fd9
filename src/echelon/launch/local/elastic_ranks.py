# SPDX-License-Identifier: Apache-2.0
"""Which ranks a job goes on without: workers of servers one by one, islands as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.launch.context import GroupPlace
from echelon.layout.islands import islands_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRanks:
    """Say which ranks a job goes on without, as long as enough of them are there."""

    ranks: tuple[int, ...]
    """Those that may be lost."""
    least: int
    """How many units of them must be there: with fewer the job ends."""
    restarts: int
    """How often each unit is started again."""
    called: str = "ranks"
    """What units are called."""
    size: int = 1
    """How many consecutive ranks are a unit: all of it is lost with one of them."""
    apart: bool = False
    """Whether each unit has a process group of its own, and all ranks are in one: any of them may
    be lost, so the launcher hosts the store, and ranks of all others hear of it. What a rank raises
    that is no error of ours is a loss too, and so is one that hangs."""

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each unit."""
        return tuple(self.ranks[at : at + self.size] for at in range(0, len(self.ranks), self.size))

    def unit_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are lost with one of `ranks`."""
        return next(unit for unit in self.units if rank in unit)

    def called_of(self, rank: int) -> str:
        """Return what the unit of a rank is called: ``island 1 (ranks 2 to 3)``."""
        unit = self.unit_of(rank)
        ranks = f"rank {unit[0]}" if len(unit) == 1 else f"ranks {unit[0]} to {unit[-1]}"
        return f"{self.called.removesuffix('s')} {self.units.index(unit)} ({ranks})"


def group_place(
    elastic: ElasticRanks | None, rank: int, world_size: int, attempt: int
) -> GroupPlace:
    """Return the process group that a rank joins: of all ranks, of its unit, or its own."""
    if elastic is not None and elastic.apart:
        unit = elastic.unit_of(rank)
        name = f"group/{unit[0]}/{attempt}"
        return GroupPlace(name=name, rank=unit.index(rank), world_size=len(unit))
    if attempt:
        # Torch lets nobody into the process group of the others.
        return GroupPlace(name=f"group/{rank}/{attempt}", rank=0, world_size=1)
    return GroupPlace(name="group", rank=rank, world_size=world_size)


def elastic_ranks(plan: Plan) -> ElasticRanks | None:
    """Return the workers or islands without which a run of a plan goes on; None of all others."""
    updates, local = plan.mathematics.updates, plan.mathematics.local_sgd
    if updates.min_workers != "all":
        return ElasticRanks(
            ranks=tuple(range(plan.mesh.num_workers)),
            least=updates.min_workers,
            restarts=updates.restarts,
            called="workers",
        )
    if local.active and local.min_islands != "all":
        return ElasticRanks(
            ranks=tuple(range(plan.mesh.world_size)),
            least=local.min_islands,
            restarts=local.restarts,
            called="islands",
            size=islands_of(plan)[0].size,
            apart=True,
        )
    return None
