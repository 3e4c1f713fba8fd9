"""Which ranks stand for which."""

from __future__ import annotations

from echelon.core.axis import Axis
from echelon.rehearsal.classes import CHECKED_RANKS, RankClasses
from tests.rehearsal.test_run import LARGE, plan_of


def test_small_worlds_are_rehearsed_rank_by_rank_and_large_ones_by_class() -> None:
    small = RankClasses(plan_of("mesh.dp_replicate=4"))
    assert (small.first_ranks(), list(small.checked())) == ([0, 1, 2, 3], [])
    assert small.context_ranks() == []
    plan = plan_of(*LARGE)
    large = RankClasses(plan)
    first = large.first_ranks()
    places = [plan.mesh.coordinates(rank) for rank in first]
    assert [(place[Axis.PP], place[Axis.CP]) for place in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    checked = large.checked()
    assert len(checked) == CHECKED_RANKS
    assert plan.mesh.world_size - 1 in checked
    assert not set(checked) & set(first)
    assert large.context_ranks() == first[:2]
    assert len(RankClasses(plan, by_context=False).first_ranks()) == 2


def test_ranks_that_own_other_matrices_are_classes_of_their_own() -> None:
    plan = plan_of("mesh.dp_shard=32", "zero.stage=1", "optimizer.kind=muon", *OF_32)
    assert RankClasses(plan).first_ranks() == list(range(32))
    assert RankClasses(plan_of("mesh.dp_shard=32", "zero.stage=1", *OF_32)).first_ranks() == [0]


OF_32 = ("cluster.preset=32xcpu", "batch.global_sequences=64")
