"""Sixteen ranks on nodes: coordinates, groups, and the links that each axis uses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from echelon.config.cluster.settings import read_typed_cluster
from echelon.core.axis import Axis
from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.grid import (
    CLUSTERS,
    DATA_FIRST,
    PIPELINE_FIRST,
    grid_and_links,
    mesh_of,
)
from echelon.planner.view.mesh_map import axis_facts
from tests.page.lessons.shown import diagrams, facts, tiles

AXES = (Axis.TP, Axis.PP, Axis.DP_REPLICATE)


@pytest.mark.system("S58")
def test_coordinates_are_those_of_the_guide_in_its_order() -> None:
    (claim,) = (one for one in all_claims() if one.id == "llm-training-61")
    assert isinstance(claim.holds, dict)
    drawn = tiles(grid_and_links().scene(order=DATA_FIRST).frames[0])
    for name, place in claim.holds.items():
        rank = int(name.removeprefix("GPU"))
        words = drawn[f"rank {rank}"].words
        assert words.replace(",", "").replace(" ", "") == place.replace(" ", "")


@pytest.mark.parametrize("order", [DATA_FIRST, PIPELINE_FIRST])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_groups_and_links_are_those_of_the_planner(order: str, cluster: str) -> None:
    mesh, machine = mesh_of(order), read_typed_cluster(cluster, "test")
    found = {fact.axis: fact for fact in axis_facts(mesh, machine)}
    frames = grid_and_links().scene(order=order, cluster=cluster).frames
    assert len(frames) == 4
    for axis, frame in zip(AXES, frames[1:], strict=True):
        fact, (board,) = found[axis], diagrams(frame)
        pairs = [pair for group in mesh.groups(axis) for pair in pairwise(group)]
        drawn = [(one.source, one.target) for one in board.moves]
        assert drawn == [(f"rank {one}", f"rank {other}") for one, other in pairs]
        assert facts(frame)["groups"] == f"{fact.num_groups} of {fact.degree} ranks"
        across = f"{fact.num_across} of {fact.num_groups}"
        assert facts(frame)["groups that cross nodes"] == across
        assert fact.link is not None
        assert facts(frame)["link"].startswith(f"{fact.link.name}, ")
        nodes = {tile.id: place.group for place in board.places for tile in place.tiles}
        for rank in range(mesh.world_size):
            assert nodes[f"rank {rank}"] == f"node {rank // machine.devices_per_node}"


def test_the_order_of_ranks_decides_what_leaves_a_node() -> None:
    across = {
        order: [
            facts(one)["groups that cross nodes"]
            for one in grid_and_links().scene(order=order).frames[1:]
        ]
        for order in (DATA_FIRST, PIPELINE_FIRST)
    }
    # Tensor, pipeline, data.
    assert across[DATA_FIRST] == ["0 of 4", "0 of 8", "8 of 8"]
    assert across[PIPELINE_FIRST] == ["0 of 4", "8 of 8", "0 of 8"]
