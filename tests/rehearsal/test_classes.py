"""Which ranks stand for which."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from echelon.core.axis import Axis
from echelon.layout.muon import muon_exchange
from echelon.rehearsal import run as classes
from echelon.rehearsal.run import CHECKED_RANKS, RankClasses, owned_elements, rehearse
from tests.rehearsal.test_run import LARGE, plan_of

OF_32 = ("cluster.preset=32xcpu", "batch.global_sequences=64")
EXPERTS = (
    "mesh.ep=2",
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.ffn=96",
)


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


def test_of_ranks_that_own_matrices_the_one_with_most_stands_for_its_class() -> None:
    plan = plan_of("mesh.dp_shard=32", "zero.stage=1", "optimizer.kind=muon", *OF_32)
    found, owned = RankClasses(plan), owned_elements(plan)
    assert len({owned[rank] for rank in range(32)}) > 1
    (first,) = found.first_ranks()
    assert owned[first] == max(owned[rank] for rank in range(32))
    checked = found.checked()
    assert len(checked) == CHECKED_RANKS
    assert min(owned[rank] for rank in checked) == min(owned[rank] for rank in range(32))
    matrices = sum(prod(one.shape) for one in muon_exchange(plan, 0).matrices)
    assert sum(owned.values()) == matrices
    assert not owned_elements(plan_of("mesh.dp_shard=32", "zero.stage=1", *OF_32))
    assert RankClasses(plan_of("mesh.dp_shard=32", "zero.stage=1", *OF_32)).first_ranks() == [0]


def test_the_rank_that_owns_least_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = Counter({rank: 5 for rank in range(32)} | {3: 9, 7: 1})
    monkeypatch.setattr(classes, "owned_elements", lambda plan: owned)
    found = RankClasses(plan_of("mesh.dp_shard=32", "zero.stage=1", *OF_32))
    assert found.first_ranks() == [3]
    for seed in range(3):
        assert {7, 31} <= set(found.checked(seed))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("more", [("model.layers=3",), ("mesh.tp=2",), EXPERTS])
def test_ranks_that_own_other_matrices_give_their_communicators_the_same(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classes, "EVERY_RANK", 0)
    monkeypatch.setattr(classes, "CHECKED_RANKS", 8)
    plan = plan_of("mesh.dp_shard=4", "zero.stage=2", "optimizer.kind=muon", *more)
    assert len(owned_elements(plan)) == plan.mesh.world_size
    found = rehearse(plan, workers=1)
    found.require()
    assert len(found.ranks) == 1
    assert len(found.checked) == plan.mesh.world_size - 1
