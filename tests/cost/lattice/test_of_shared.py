"""What devices of a node share is shared among its ranks: cores, and ways into a network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.cluster import Cluster, Device, Link
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.products import aligned_share

LINKS = (
    Link(name="inside", degree=4, bandwidth=8e9, latency_s=1e-4),
    Link(name="network", degree=8, bandwidth=4e9, latency_s=2e-4),
)
DEVICE = Device(
    name="core", memory_bytes=2**30, memory_bandwidth=1e10, peak_flops=(("fp32", 4e10),)
)
CLUSTER = Cluster(name="two nodes", device=DEVICE, devices_per_node=4, nodes=2, links=LINKS)


def test_ranks_on_fewer_cores_have_a_part_of_one() -> None:
    shared = replace(CLUSTER, device=replace(DEVICE, cores=2.0))
    alone, all_four = machine_numbers(shared, "fp32", ranks=2), machine_numbers(shared, "fp32")
    assert alone == machine_numbers(CLUSTER, "fp32")
    assert (alone.share, all_four.share) == (1.0, 0.5)
    assert all_four.peak_flops == 2e10
    assert all_four.memory_bandwidth == 5e9
    assert [tier.latency_s for tier in all_four.tiers] == [2e-4, 4e-4]
    # More ranks than a node has devices are on several nodes.
    assert machine_numbers(shared, "fp32", ranks=8) == all_four


def test_devices_share_the_interfaces_of_their_node() -> None:
    inside, network = LINKS
    shared = replace(CLUSTER, links=(inside, replace(network, interfaces=1)))
    assert [tier.bandwidth for tier in machine_numbers(CLUSTER).tiers] == [8e9, 4e9]
    assert [tier.bandwidth for tier in machine_numbers(shared).tiers] == [8e9, 1e9]


def test_a_device_that_loads_any_row_as_fast_has_nothing_unaligned() -> None:
    numbers = machine_numbers(CLUSTER, "fp32")
    assert float(aligned_share(numbers, 3.0)) < float(aligned_share(numbers, 8.0)) < 1.0
    assert float(aligned_share(replace(numbers, aligned=1.0), 3.0)) == pytest.approx(1.0)
