"""The mesh map: groups lie where the mesh says, and large meshes are counted, not drawn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.axis import Axis
from echelon.core.cluster import Cluster, Device, Link
from echelon.core.mesh import Mesh
from echelon.planner.view.figure_text import mesh_lines
from echelon.planner.view.mesh_map import axis_facts, mesh_map
from tests.planner.view.figures import assert_narrow, text_of
from tests.walks import examples

LARGE = Mesh(pp=16, dp_shard=128, tp=8)


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


@st.composite
def maps(draw: st.DrawFn) -> tuple[Mesh, Cluster, int]:
    """Draw a mesh, a cluster with room for it or not, and how experts are split."""
    degree = st.sampled_from((1, 2, 3, 4))
    pp, replicate, shard, cp, tp = (draw(degree) for _ in range(5))
    expert_tp = draw(st.sampled_from((1, tp)))
    fold = shard * cp * (tp if expert_tp == 1 else 1)
    ep = draw(st.sampled_from([n for n in range(1, fold + 1) if fold % n == 0]))
    mesh = Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep)
    per_node = draw(st.sampled_from((1, 2, 5, 8, 72, 128)))
    nodes = max(-(-mesh.world_size // per_node), 1)
    name = draw(st.text())
    return mesh, _cluster(nodes, per_node, name=name, interfaces=draw(st.integers(0, 2))), expert_tp


@settings(max_examples=examples(60))
@given(maps())
def test_facts_are_those_of_the_groups_of_the_mesh(drawn: tuple[Mesh, Cluster, int]) -> None:
    mesh, cluster, expert_tp = drawn
    for fact in axis_facts(mesh, cluster, expert_tp=expert_tp):
        is_ep = fact.axis is Axis.EP
        groups = mesh.expert_groups(expert_tp=expert_tp) if is_ep else mesh.groups(fact.axis)
        nodes = [{rank // cluster.devices_per_node for rank in group} for group in groups]
        assert fact.degree == len(groups[0]) > 1
        assert fact.num_groups == len(groups)
        assert fact.num_across == sum(len(one) > 1 for one in nodes)
        assert fact.most_nodes == max(map(len, nodes))
        assert fact.link is cluster.links[0 if fact.num_across == 0 else 1]


@settings(max_examples=examples(40))
@given(maps())
def test_any_map_fits_80_columns(drawn: tuple[Mesh, Cluster, int]) -> None:
    mesh, cluster, expert_tp = drawn
    found = mesh_map(mesh, cluster, expert_tp=expert_tp)
    assert_narrow(text_of(mesh_lines(found)))


def test_every_device_of_a_few_nodes_is_drawn_with_its_coordinates() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep=2)
    found = mesh_map(mesh, _cluster(2, 8))
    devices = [device for node in found.shown_nodes for device in found.devices(node)]
    assert len(devices) == 16
    assert devices[0].coordinates == ("pp0", "rep0", "shard0", "tp0", "ep0")
    assert devices[11].coordinates == ("pp1", "rep0", "shard1", "tp1", "ep1")
    text = text_of(mesh_lines(found))
    assert "node 0\n" in text
    assert "node 1\n" in text
    assert found.parts() == ()


def test_of_a_large_mesh_one_node_is_drawn_and_the_others_are_counted() -> None:
    found = mesh_map(LARGE, _cluster(2048, 8))
    text = text_of(mesh_lines(found))
    assert "pp 16 x dp_shard 128 x tp 8 = 16,384 ranks" in text
    assert text.count("node 0\n") == 1
    assert "node 1\n" not in text
    assert "The 2,048 nodes hold the ranks" in text
    assert "pp15: nodes 1,920-2,047, 1,024 ranks" in text
    assert len(found.parts()) == 16
    assert len(text.splitlines()) < 40
    more = mesh_map(Mesh(pp=64, dp_shard=32, tp=8), _cluster(2048, 8)).parts()
    assert len(more) == 16
    assert more[-2:] == ("49 more, as many nodes each", "pp63: nodes 2,016-2,047, 256 ranks")


def test_an_axis_is_inside_of_nodes_or_crosses_over_the_link_that_it_needs() -> None:
    rows = {row[0]: row[1:] for row in mesh_map(LARGE, _cluster(2048, 8)).rows()}
    assert rows["tp"] == ("8", "2,048", "in a node", "1", "450.00 GB/s", "near")
    assert rows["dp_shard"] == ("128", "128", "crosses", "128", "50.00 GB/s", "far")
    assert rows["pp"] == ("16", "1,024", "crosses", "16", "50.00 GB/s", "far")
    (uneven,) = axis_facts(Mesh(tp=3, pp=1), _cluster(2, 2))
    assert uneven.where == "crosses"
    some = axis_facts(Mesh(dp_shard=4, tp=3), _cluster(3, 4))[0]
    assert (some.where, some.num_across, some.num_groups) == ("some cross", 2, 4)


def test_shared_interfaces_and_devices_without_a_rank_are_told() -> None:
    text = text_of(mesh_lines(mesh_map(Mesh(pp=3, tp=4), _cluster(2, 8, interfaces=2))))
    assert "far: the 8 devices of a node share 2 interfaces" in text
    assert "node 1, 4 of its 8 devices without a rank" in text
    assert "interface" not in text_of(
        mesh_lines(mesh_map(Mesh(tp=4), _cluster(1, 8, interfaces=1)))
    )
    assert "1 rank\n" in text_of(mesh_lines(mesh_map(Mesh(), _cluster(1, 1))))


def test_experts_that_fold_over_nothing_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="ep = 4 does not divide"):
        mesh_map(Mesh(dp_shard=2, ep=4), _cluster(1, 8))
