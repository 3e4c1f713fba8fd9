"""Which ranks are lost together, what they are called, and the process groups that they join."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.choices.local_sgd import LocalSgd
from echelon.launch.local.elastic_ranks import ElasticRanks, elastic_ranks, group_place
from tests.proof.layouts import layout
from tests.proof.run.local_sgd import with_islands

ISLANDS = ElasticRanks(num_ranks=6, least=1, restarts=1, size=2)


def test_an_island_is_a_block_of_ranks() -> None:
    assert ISLANDS.islands == ((0, 1), (2, 3), (4, 5))
    assert ISLANDS.island_of(3) == (2, 3)
    assert ISLANDS.name_of(5) == "island 2 (ranks 4 to 5)"
    assert replace(ISLANDS, size=1).name_of(5) == "island 5 (rank 5)"


def test_islands_are_apart_and_other_ranks_together() -> None:
    place = group_place(ISLANDS, 3, 6, 0)
    assert (place.name, place.rank, place.world_size) == ("group/2/0", 1, 2)
    assert group_place(ISLANDS, 3, 6, 2).name == "group/2/2"
    together = group_place(None, 1, 3, 0)
    assert (together.name, together.rank, together.world_size) == ("group", 1, 3)


def test_a_plan_says_which_ranks_may_be_lost() -> None:
    plan = with_islands(layout(tp=2), 3, min_islands=2, restarts=4)
    found = elastic_ranks(plan)
    assert found is not None
    assert (found.size, found.least, found.restarts) == (2, 2, 4)
    assert len(found.islands) == plan.mathematics.local_sgd.islands == 3
    undisturbed = replace(
        plan,
        mathematics=replace(plan.mathematics, local_sgd=plan.mathematics.local_sgd.undisturbed()),
    )
    assert elastic_ranks(undisturbed) is None
    assert not LocalSgd(min_islands=1).is_elastic
