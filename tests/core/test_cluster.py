"""Tiers that join groups, shares of interfaces and of cores: cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.cluster.settings import named_cluster
from echelon.core.cluster import (
    Cluster,
    Device,
    Link,
    cluster_under_load,
    domain_text,
    fast_domain,
    joining_tier,
    shared_bandwidth,
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


@pytest.mark.system("S45")
@pytest.mark.parametrize(
    ("degree", "stride", "link"),
    [
        (1, 1, None),
        (2, 1, "pair"),
        (2, 2, "node"),
        (8, 1, "node"),
        (4, 2, "node"),
        (16, 1, "net"),
        (4, 8, "net"),
        (2, 16, "net"),
        (3, 2, "net"),  # Ranks 6, 8 and 10 straddle two nodes.
    ],
)
def test_the_tier_that_joins_every_group(degree: int, stride: int, link: str | None) -> None:
    found = joining_tier(_cluster(4), degree, stride)
    assert (found.name if found else None) == link


def test_devices_share_interfaces_where_all_send() -> None:
    for interfaces, wanted in ((0, 10.0), (2, 2.5), (16, 10.0)):
        cluster = _cluster(2, interfaces=interfaces)
        assert shared_bandwidth(cluster, cluster.links[-1]) == wanted
    assert shared_bandwidth(_cluster(2, interfaces=2), NODE) == 100.0


def test_more_ranks_than_devices() -> None:
    with pytest.raises(ValueError, match="16 ranks 8 apart are more than 32 devices"):
        joining_tier(
            Cluster(name="c", device=CARD, devices_per_node=8, nodes=4, links=(PAIR, NODE)), 16, 8
        )


def test_ranks_that_share_cores_are_slower_where_all_compute() -> None:
    card = replace(CARD, cores=2.0, peak_flops=(("fp32", 8.0),))
    shared = replace(_cluster(4), device=card)
    assert cluster_under_load(shared, 2) == shared
    slower = cluster_under_load(shared, 8).device
    assert cluster_under_load(shared, 8).links[0] == replace(PAIR, bandwidth=50.0, latency_s=4.0)
    assert (slower.flops("fp32"), slower.memory_bandwidth, slower.cores) == (2.0, 250.0, 0.0)
    assert slower.efficiency.launch_s == 4 * card.efficiency.launch_s
    assert cluster_under_load(_cluster(4), 8) == _cluster(4)


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
