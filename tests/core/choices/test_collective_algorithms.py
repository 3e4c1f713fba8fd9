"""Which groups an algorithm fits, and what auto means on a cluster."""

from __future__ import annotations

import pytest

from echelon.core.choices.collective_algorithms import (
    BACKEND,
    COLLECTIVE_ALGORITHMS,
    HIERARCHICAL,
    algorithm_index,
    algorithm_of_group,
    fits_group,
    members_per_node,
)
from echelon.core.choices.registry import load_reference


def test_members_of_each_node() -> None:
    assert members_per_node((0, 1, 2, 3), 2) == 2
    assert members_per_node((0, 2, 4, 6), 4) == 2
    assert members_per_node((0, 1, 2), 2) == 0


@pytest.mark.parametrize(
    ("ranks", "fits"),
    [((0, 1, 2, 3), True), ((0, 1), False), ((0, 2), False), ((0, 1, 2), False)],
)
def test_a_hierarchy_is_for_several_ranks_on_several_nodes(
    ranks: tuple[int, ...], fits: bool
) -> None:
    assert fits_group(HIERARCHICAL, ranks, 2) == fits
    assert algorithm_of_group(HIERARCHICAL, ranks, 2) == (HIERARCHICAL if fits else BACKEND)
    assert algorithm_of_group("ring", ranks, 2) == "ring"


def test_every_record_names_what_makes_its_steps() -> None:
    for place, (name, record) in enumerate(COLLECTIVE_ALGORITHMS.items()):
        assert algorithm_index(name) == place
        assert (record.runner == "") == (name == BACKEND)
        assert not record.runner or callable(load_reference(record.runner))
