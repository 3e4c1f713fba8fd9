"""What auto means of sums on a cluster: by the seconds of both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.choices.collective_algorithms import BACKEND, HIERARCHICAL
from echelon.core.cluster import Cluster, Device, Link
from echelon.cost.seconds.automatic_sums import automatic_algorithm

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
