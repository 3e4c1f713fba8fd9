"""Links of groups by hand: who shares a node's interfaces, and what a library's own hops cost."""

from __future__ import annotations

import pytest

from echelon.cost.inputs.cost_inputs import (
    data_group_links,
    group_link_numbers,
    library_group_links,
    pairwise_group_links,
)
from tests.cost.seconds.small_work import MACHINE, small_work, with_trainer


def test_ranks_a_node_apart_have_one_interface_each() -> None:
    way = group_link_numbers(MACHINE, 4.0, 4.0)
    assert (way.ranks_per_node, way.bus_bandwidth) == (1.0, 5e7)
    half = group_link_numbers(MACHINE, 4.0, 2.0)
    assert (half.ranks_per_node, half.bus_bandwidth) == (2.0, 1e8)


def test_a_library_takes_its_own_latency_of_each_hop() -> None:
    work = small_work()
    ours = pairwise_group_links(work, 8.0, 1.0)
    assert ours == group_link_numbers(MACHINE, 8.0, 1.0)
    slower = with_trainer(work, own_hops=3.0)
    library = library_group_links(slower, 8.0, 1.0)
    assert (library.node_latency_s, library.latency_s) == pytest.approx((3e-5, 3e-4))
    assert library.bus_bandwidth == ours.bus_bandwidth


def test_all_pairs_at_once_take_the_latency_of_one_hop_in_place_of_a_ring() -> None:
    direct = with_trainer(small_work(), by_pairs=1.0, pair_hops=0.0)
    # Three hops around a ring of four ranks of a node, or one.
    assert pairwise_group_links(direct, 4.0, 1.0).node_latency_s == pytest.approx(1e-5 / 3)


def test_weights_are_cut_over_shards_and_repeated_over_replicas() -> None:
    ways = data_group_links(small_work(dp_shard=4.0, dp_replicate=2.0))
    assert (ways.shared.degree, ways.replicate.degree) == (4.0, 2.0)
    # Shards are neighbours in a node; a replica of each is on the other one.
    assert (ways.shared.ranks_per_node, ways.replicate.ranks_per_node) == (4.0, 1.0)
