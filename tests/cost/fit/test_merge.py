"""Several measured clusters tell one: medians of rates, and links from those that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.cluster import Cluster, Device, Efficiency, Link
from echelon.cost.fit.merge import is_inside, median_cluster, median_link

WIRE = Link(name="wire", degree=4, bandwidth=1e10, latency_s=1e-5, efficiency=0.8, half_bytes=1e4)
NODE = Cluster(
    name="node",
    device=Device(
        name="card",
        memory_bytes=2**33,
        memory_bandwidth=1e12,
        peak_flops=(("bf16", 1e14),),
        efficiency=Efficiency(matmul=0.6, memory=0.5, half_depth=100.0, units=10, tile=128),
    ),
    devices_per_node=4,
    nodes=1,
    links=(WIRE,),
    trainer=(("step_s", 0.01),),
)


def _with(cluster: Cluster, **constants: float) -> Cluster:
    device = cluster.device
    efficiency = replace(device.efficiency, **constants)  # type: ignore[arg-type]
    return replace(cluster, device=replace(device, efficiency=efficiency))


def test_one_cluster_twice_is_itself() -> None:
    merged = median_cluster([NODE, NODE])
    assert merged == replace(NODE, name="4x card")


def test_constants_are_medians() -> None:
    nodes = [_with(NODE, half_depth=value, launch_s=value / 1e6) for value in (90.0, 10.0, 40.0)]
    merged = median_cluster(nodes).device.efficiency
    assert (merged.half_depth, merged.launch_s) == (40.0, 4e-5)


def test_of_shares_the_rate_is_what_counts() -> None:
    # One reached a higher peak, and the same rate.
    device = replace(NODE.device, peak_flops=(("bf16", 2e14),), memory_bandwidth=2e12)
    other = _with(replace(NODE, device=device), matmul=0.3, memory=0.25, attention=0.25)
    merged = median_cluster([NODE, other]).device
    ((dtype, peak),) = merged.peak_flops
    assert (dtype, peak) == ("bf16", 1.5e14)
    assert peak * merged.efficiency.matmul == pytest.approx(6e13)
    assert peak * merged.efficiency.attention == pytest.approx(5e13)
    assert merged.memory_bandwidth * merged.efficiency.memory == pytest.approx(5e11)


def test_constants_of_products_are_those_of_the_usual_tile() -> None:
    odd = _with(NODE, tile=32, half_depth=5.0)
    merged = median_cluster([odd, NODE, _with(NODE, half_depth=120.0)]).device.efficiency
    assert (merged.tile, merged.half_depth) == (128, 110.0)


def test_a_device_alone_and_nodes_are_as_large_as_the_largest() -> None:
    alone = _with(replace(NODE, devices_per_node=1, links=(), trainer=()), half_depth=300.0)
    network = Link(name="net", degree=8, bandwidth=1e9, latency_s=1e-4)
    nodes = replace(NODE, nodes=2, links=(replace(WIRE, bandwidth=3e10), network))
    merged = median_cluster([alone, nodes, NODE])
    assert (merged.devices_per_node, merged.nodes) == (4, 2)
    assert [link.degree for link in merged.links] == [4, 8]
    assert merged.links[0].bandwidth == 2e10
    assert merged.links[1] == network
    assert merged.device.efficiency.half_depth == 100.0
    assert merged.trainer == (("step_s", 0.01),)
    assert merged.name == "8x card"


def test_a_link_reaches_the_median_of_what_was_reached() -> None:
    slow = replace(WIRE, bandwidth=2e10, efficiency=0.1, latency_s=3e-5)
    merged = median_link([WIRE, slow, replace(WIRE, bandwidth=4e10)])
    assert merged.bandwidth == 2e10
    assert merged.bandwidth * merged.efficiency == pytest.approx(8e9)
    assert merged.latency_s == 1e-5
    assert is_inside(NODE, WIRE)
    assert not is_inside(replace(NODE, devices_per_node=2), WIRE)
