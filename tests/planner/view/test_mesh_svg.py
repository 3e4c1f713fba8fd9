"""Devices of a figure are those of the map, in the boxes of their nodes."""

from __future__ import annotations

from echelon.core.cluster import Cluster, Device, Link
from echelon.core.mesh import Mesh
from echelon.planner.view.mesh_map import mesh_map
from echelon.planner.view.mesh_svg import mesh_svg
from tests.planner.view.figures import (
    number,
    rects,
)


def _cluster(nodes: int, per_node: int, *, name: str = "test", interfaces: int = 0) -> Cluster:
    near = Link(name="near", degree=per_node, bandwidth=450e9, latency_s=1e-6)
    far = Link(
        name="far",
        degree=nodes * per_node,
        bandwidth=50e9,
        latency_s=1e-5,
        interfaces=interfaces,
    )
    device = Device(name="device <1> & more", memory_bytes=80 * 10**9, memory_bandwidth=3e12)
    return Cluster(
        name=name, device=device, devices_per_node=per_node, nodes=nodes, links=(near, far)
    )


def test_devices_lie_in_the_box_of_their_node() -> None:
    figure = mesh_svg(mesh_map(Mesh(pp=2, tp=8), _cluster(2, 8)))
    nodes = [part for part in figure.split("<rect ") if part.startswith('class="node"')]
    assert len(nodes) == 2
    tops = [float(part.split(' y="')[1].split('"')[0]) for part in nodes]
    boxes = rects(figure, "box")
    assert {box.get("class") for box in boxes[:8]} == {"box pp0"}
    assert all(tops[0] < number(box, "y") < tops[1] for box in boxes[:8])
    assert all(number(box, "y") > tops[1] for box in boxes[8:])
