"""Ways between ranks, and what groups of them get: cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.cluster import named_cluster
from echelon.core.cluster import Cluster, Device, Link
from echelon.core.topology import (
    crossed_tier,
    crowded,
    domain_text,
    fast_domain,
    group_way,
    nodes_of_group,
    path,
    ranks_per_node,
)

PAIR = Link(name="pair", degree=2, bandwidth=200.0, latency_s=1.0)
NODE = Link(name="node", degree=8, bandwidth=100.0, latency_s=2.0)
CARD = Device(name="card", memory_bytes=1, memory_bandwidth=1000.0)


def _cluster(nodes: int, interfaces: int = 0) -> Cluster:
    network = Link(
        name="net", degree=8 * nodes, bandwidth=10.0, latency_s=5.0, interfaces=interfaces
    )
    return Cluster(
        name="c", device=CARD, devices_per_node=8, nodes=nodes, links=(PAIR, NODE, network)
    )


@pytest.mark.parametrize(
    ("first", "second", "link", "latency"),
    [
        (0, 1, "pair", 1.0),
        (1, 2, "node", 2.0),
        (0, 7, "node", 2.0),
        (7, 8, "net", 5.0),
        (31, 0, "net", 5.0),
        (14, 15, "pair", 1.0),
    ],
)
def test_the_way_between_two_ranks(first: int, second: int, link: str, latency: float) -> None:
    for one, other in ((first, second), (second, first)):
        found = path(_cluster(4), one, other)
        assert found.link is not None
        assert (found.link.name, found.latency_s) == (link, latency)
        assert found.bandwidth == found.shared == found.link.bandwidth


def test_a_rank_reads_its_own_memory_and_no_rank_is_outside() -> None:
    found = path(_cluster(2), 3, 3)
    assert (found.link, found.bandwidth, found.latency_s) == (None, 1000.0, 0.0)
    with pytest.raises(IndexError, match="rank 16 is outside a cluster of 16"):
        path(_cluster(2), 0, 16)


def test_devices_share_interfaces_where_all_send() -> None:
    found = path(_cluster(2, interfaces=2), 0, 8)
    assert (found.bandwidth, found.shared) == (10.0, 2.5)
    assert path(_cluster(2, interfaces=16), 0, 8).shared == 10.0
    assert path(_cluster(2, interfaces=2), 0, 4).shared == 100.0


@pytest.mark.parametrize(
    ("degree", "stride", "link", "per_node", "nodes", "ring"),
    [
        (1, 1, None, 1, 1, 1000.0),
        (2, 1, "pair", 2, 1, 200.0),
        (2, 2, "node", 2, 1, 100.0),
        (8, 1, "node", 8, 1, 100.0),
        (4, 2, "node", 4, 1, 100.0),
        (16, 1, "net", 8, 2, 80.0),  # 8 interfaces of 10 are slower than the node's 100.
        (4, 8, "net", 1, 4, 10.0),
        (8, 4, "net", 2, 4, 20.0),
        (2, 16, "net", 1, 2, 10.0),
        (3, 2, "net", 1, 2, 10.0),  # Ranks 6, 8 and 10 straddle two nodes.
    ],
)
def test_what_a_group_gets(
    degree: int, stride: int, link: str | None, per_node: int, nodes: int, ring: float
) -> None:
    found = group_way(_cluster(4), degree, stride)
    assert (found.link.name if found.link else None) == link
    assert (found.per_node, found.nodes, found.ring) == (per_node, nodes, ring)


def test_a_group_alone_on_its_nodes_has_its_share_of_few_interfaces() -> None:
    shared = _cluster(4, interfaces=4)
    # Tensor parallel over 16: 8 ranks of a node use its 4 interfaces.
    assert group_way(shared, 16, 1).ring == 40.0
    # Data parallel with tp 8: each of 8 groups has half of an interface.
    assert group_way(shared, 4, 8).ring == 5.0
    assert group_way(shared, 4, 8).pair == 5.0


def test_inside_of_a_node_is_faster_by_the_ratio_of_the_links() -> None:
    near, far = group_way(_cluster(4), 8, 1), group_way(_cluster(4), 4, 8)
    assert near.ring / far.ring == 10.0


def test_more_ranks_than_devices() -> None:
    with pytest.raises(ValueError, match="16 ranks 8 apart are more than 32 devices"):
        crossed_tier(
            Cluster(name="c", device=CARD, devices_per_node=8, nodes=4, links=(PAIR, NODE)), 16, 8
        )


def test_ranks_of_a_group_on_a_node() -> None:
    cluster = _cluster(4)
    assert [ranks_per_node(cluster, degree, 1) for degree in (2, 6, 8, 32)] == [2, 1, 8, 8]
    assert [ranks_per_node(cluster, 8, stride) for stride in (2, 3, 8, 100)] == [4, 2, 1, 1]
    assert [nodes_of_group(cluster, 8, stride) for stride in (1, 2, 3, 100)] == [1, 2, 3, 8]


def test_ranks_that_share_cores_are_slower_where_all_compute() -> None:
    card = replace(CARD, cores=2.0, peak_flops=(("fp32", 8.0),))
    shared = replace(_cluster(4), device=card)
    assert crowded(shared, 2) == shared
    slower = crowded(shared, 8).device
    assert crowded(shared, 8).links[0] == replace(PAIR, bandwidth=50.0, latency_s=4.0)
    assert (slower.flops("fp32"), slower.memory_bandwidth, slower.cores) == (2.0, 250.0, 0.0)
    assert slower.efficiency.launch_s == 4 * card.efficiency.launch_s
    assert crowded(_cluster(4), 8) == _cluster(4)


@pytest.mark.parametrize(
    ("name", "domain", "text"),
    [
        ("16xh100", 8, "nodes of 8"),
        ("4xh100", 4, "nodes of 4"),
        ("128xgb200", 64, "NVLink 5 domains of 64"),
        ("144xgb300", 72, "NVLink 5 domains of 72"),
        ("16xmi250x", 8, "nodes of 8"),
        ("laptop", 8, "nodes of 8"),
    ],
)
def test_the_fast_links_join_a_node_or_a_rack_that_is_wired_as_one(
    name: str, domain: int, text: str
) -> None:
    cluster = named_cluster(name, "test")
    assert isinstance(cluster, Cluster)
    assert fast_domain(cluster) == domain
    assert domain_text(cluster) == text


def test_nodes_of_one_device_are_joined_by_the_fastest_of_several_tiers() -> None:
    rack = replace(NODE, name="rack", degree=4)
    cluster = Cluster(name="hoppers", device=CARD, devices_per_node=1, nodes=8, links=(rack, NODE))
    assert fast_domain(cluster) == 4
    assert fast_domain(replace(cluster, links=(NODE,))) == 1
