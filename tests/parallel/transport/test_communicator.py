"""Processes that torch has joined: shared by groups of the same ranks, and opened at the start."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.completion.completion import Completion
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.collectives import Communicator
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.layouts import NANO, plan_of

TIED = replace(NANO, layers=4, tied=True)


class Counting(Completion):
    """Write down which communicators are made."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def communicator(self, name: str, ranks: tuple[int, ...], rank: int) -> Communicator | None:
        """Join the ranks."""
        self.made.append((name, ranks))
        return super().communicator(name, ranks, rank)


def made_communicators(context: RankContext, argument: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """Return what a rank makes, in its order; the first exchange has number 1."""
    completion = Counting()
    groups = rank_groups(argument, Recorder(context.rank, EventList()), completion)
    communicator = groups.world.communicator
    assert communicator is not None
    assert communicator.is_gloo
    assert (communicator.next_exchange(), communicator.next_exchange()) == (1, 2)
    return completion.made


def test_every_rank_makes_the_same_communicators_in_one_order(rank_pool: RankPool) -> None:
    plan = plan_of(model=TIED, pp=2, dp=2, tp=2)
    found = rank_pool.run(made_communicators, plan, world_size=plan.mesh.world_size)
    assert all(one == found[0] for one in found)


def test_groups_of_the_same_ranks_share_one_but_for_those_between_stages(
    rank_pool: RankPool,
) -> None:
    plan = plan_of(model=TIED, pp=2, dp=2)
    (made, *_) = rank_pool.run(made_communicators, plan, world_size=plan.mesh.world_size)
    between = [name for name, ranks in made if ranks == (0, 2)]
    assert between == ["pipe_forward", "pipe_backward", "tied"]
    others = [ranks for name, ranks in made if name not in between]
    assert len(others) == len(set(others))
