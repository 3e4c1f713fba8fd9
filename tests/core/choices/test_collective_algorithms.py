"""Which groups an algorithm fits, and what auto means on a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.choices.collective_algorithms import (
    BACKEND,
    COLLECTIVE_ALGORITHMS,
    HIERARCHICAL,
    algorithm_index,
    algorithm_of_group,
    automatic_algorithm,
    fits_group,
    members_per_node,
)
from echelon.core.choices.registry import load_reference
from echelon.core.cluster import Cluster, Device, Link

TWO_BOXES = Cluster(
    name="boxes",
    device=Device(name="cpu", memory_bytes=1, memory_bandwidth=1.0),
    devices_per_node=2,
    nodes=2,
    links=(
        Link(name="memory", degree=2, bandwidth=2.0, latency_s=0.0),
        Link(name="network", degree=4, bandwidth=1.0, latency_s=0.0),
    ),
    backend="gloo",
)


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


def test_auto_is_hierarchical_over_gloo_where_nodes_are_wired_faster() -> None:
    assert automatic_algorithm(TWO_BOXES)[0] == HIERARCHICAL
    one = replace(TWO_BOXES, nodes=1)
    slow_inside = replace(TWO_BOXES, links=tuple(reversed(TWO_BOXES.links)))
    for other in (replace(TWO_BOXES, backend="nccl"), one, slow_inside):
        algorithm, why = automatic_algorithm(other)
        assert algorithm == BACKEND
        assert why


def test_every_record_names_what_makes_its_steps() -> None:
    for place, (name, record) in enumerate(COLLECTIVE_ALGORITHMS.items()):
        assert algorithm_index(name) == place
        assert (record.runner == "") == (name == BACKEND)
        assert not record.runner or callable(load_reference(record.runner))
