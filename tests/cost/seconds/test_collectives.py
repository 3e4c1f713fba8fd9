"""Seconds of collectives inside of a node and over several, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from echelon.core.choices.collective_algorithms import BACKEND, HIERARCHICAL, algorithm_index
from echelon.core.cluster import Cluster, Device, Link
from echelon.cost.inputs.cost_inputs import GroupLinkNumbers, group_link_numbers
from echelon.cost.inputs.numbers import Num
from echelon.cost.seconds.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    automatic_algorithm,
    gather_seconds,
    point_to_point_seconds,
    sum_seconds,
)
from tests.cost.seconds.small_work import MACHINE

MB = 1e6


def test_inside_of_a_node() -> None:
    way = group_link_numbers(MACHINE, 4.0, 1.0)
    assert all_gather_seconds(way, MB) == pytest.approx(3e-5 + 0.75 * MB / 1e9)
    assert all_reduce_seconds(way, MB) == pytest.approx(6e-5 + 1.5 * MB / 1e9)
    assert all_to_all_seconds(way, MB) == pytest.approx(2e-5 + 0.75 * MB / 1e9)
    assert point_to_point_seconds(way, MB) == pytest.approx(1e-5 + MB / 1e9)


def test_over_two_nodes_four_ranks_use_four_interfaces_together() -> None:
    way = group_link_numbers(MACHINE, 8.0, 1.0)
    assert (way.ranks_per_node, way.network_bandwidth, way.bus_bandwidth) == (4.0, 5e7, 2e8)
    hops = 2 * 3 * 1e-5 + 2 * 1e-4
    assert all_gather_seconds(way, MB) == pytest.approx(hops + 7 / 8 * (MB + 1000) / 2e8)
    # By trees: there and back in each node, over one edge between them, and one more hop.
    trees = 2 * 3 * 1e-5 + 2 * 1e-4 + 1e-4
    assert trees < 2 * hops
    assert all_reduce_seconds(way, MB) == pytest.approx(trees + 7 / 4 * (MB + 1000) / 2e8)
    far = MB * 4 / 8 / 5e7
    assert all_to_all_seconds(way, MB) == pytest.approx(1e-4 * sqrt(8) + far + 1000 / 2e8)
    assert point_to_point_seconds(way, MB) == pytest.approx(1e-4 + (MB + 1000) / 5e7)


@pytest.mark.parametrize(
    "seconds",
    [all_gather_seconds, all_reduce_seconds, all_to_all_seconds, point_to_point_seconds],
)
def test_one_rank_sends_nothing_and_arrays_are_groups_one_by_one(
    seconds: Callable[[GroupLinkNumbers, Num], Num],
) -> None:
    degrees = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    many = seconds(group_link_numbers(MACHINE, degrees, 1.0), MB)
    alone = [float(seconds(group_link_numbers(MACHINE, one, 1.0), MB)) for one in degrees]
    assert np.asarray(many).tolist() == alone
    assert alone[0] == 0.0
    assert min(alone[1:]) > 0.0


def two_nodes(local: float = 2.0, nodes: float = 2.0) -> GroupLinkNumbers:
    """Return links of 4 GB/s inside of nodes and 1 GB/s between them."""
    return GroupLinkNumbers(
        degree=local * nodes,
        ranks_per_node=local,
        node_bandwidth=4e9,
        network_bandwidth=1e9,
        bus_bandwidth=min(4e9, local * 1e9),
        node_latency_s=0.0,
        latency_s=0.0,
        half_bytes=0.0,
    )


def sums_of_two_nodes(name: str, local: float = 2.0, nodes: float = 2.0) -> float:
    """Return the seconds of summing 8 GB."""
    return float(sum_seconds(two_nodes(local, nodes), 8e9, float(algorithm_index(name))))


def gather_of_two_nodes(name: str, local: float = 2.0, nodes: float = 2.0) -> float:
    """Return the seconds of gathering 8 GB, 7 where nothing is told of an algorithm."""
    way, index = two_nodes(local, nodes), float(algorithm_index(name))
    return float(gather_seconds(way, 8e9, index, direct=7.0))


def test_seconds_of_each_algorithm_by_hand() -> None:
    # A ring: 2 x 3/4 x 8 GB at the 2 GB/s of both ranks of a node.
    assert sums_of_two_nodes("backend") == sums_of_two_nodes("ring") == pytest.approx(6.0)
    # A tree: 8 GB up and down, once inside at 4 GB/s, once between nodes at 2 GB/s.
    assert sums_of_two_nodes("tree") == pytest.approx(2 * (2.0 + 4.0))
    # Halves: 4 GB between nodes at 1 GB/s, 2 GB inside at 4 GB/s, and back.
    assert sums_of_two_nodes("halving-doubling") == pytest.approx(2 * (4.0 + 0.5))
    # A hierarchy: 4 GB inside at 4 GB/s, 2 GB between nodes at 1 GB/s, and back.
    assert sums_of_two_nodes("hierarchical") == pytest.approx(2 * (1.0 + 2.0))


def test_slices_are_gathered_in_half_of_the_seconds_of_a_sum() -> None:
    for name in ("ring", "halving-doubling", "hierarchical"):
        assert 2 * gather_of_two_nodes(name) == sums_of_two_nodes(name)
    # Pairs exchange slices with the backend, beside a tree, and where a hierarchy does not fit.
    assert gather_of_two_nodes("backend") == gather_of_two_nodes("tree") == 7.0
    assert gather_of_two_nodes("hierarchical", 4.0, 1.0) == 7.0


def test_a_hierarchy_that_does_not_fit_takes_what_the_backend_takes() -> None:
    for local, nodes in ((1.0, 4.0), (4.0, 1.0)):
        assert sums_of_two_nodes("hierarchical", local, nodes) == sums_of_two_nodes(
            "backend", local, nodes
        )


TWO_BOXES = Cluster(
    name="boxes",
    device=Device(name="cpu", memory_bytes=1, memory_bandwidth=1.0),
    devices_per_node=2,
    nodes=2,
    links=(
        Link(name="memory", degree=2, bandwidth=1e10, latency_s=0.0),
        Link(name="network", degree=4, bandwidth=1e9, latency_s=0.0),
    ),
    backend="gloo",
)


def with_links(inside: float, interfaces: int = 0) -> Cluster:
    """Return two boxes whose inner links have so many bytes/s."""
    near, far = TWO_BOXES.links
    links = (replace(near, bandwidth=inside), replace(far, interfaces=interfaces))
    return replace(TWO_BOXES, links=links)


@pytest.mark.parametrize(
    ("inside", "interfaces", "algorithm"),
    [(4.1e9, 0, HIERARCHICAL), (3.9e9, 0, BACKEND), (2.1e9, 1, HIERARCHICAL), (1.9e9, 1, BACKEND)],
)
def test_a_hierarchy_is_taken_where_it_is_faster(
    inside: float, interfaces: int, algorithm: str
) -> None:
    found, why = automatic_algorithm(with_links(inside, interfaces))
    assert found == algorithm
    assert "ms for 64 MB" in why


def test_nccl_and_one_node_are_left_to_the_backend() -> None:
    one_each = replace(TWO_BOXES, devices_per_node=1, nodes=4)
    for other in (replace(TWO_BOXES, backend="nccl"), replace(TWO_BOXES, nodes=1), one_each):
        assert automatic_algorithm(other)[0] == BACKEND
