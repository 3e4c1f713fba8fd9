"""Racks that are wired as nodes are nodes to the questions of guides."""

from __future__ import annotations

from echelon.cost.seconds.trainers import FRAMEWORKS, OURS
from echelon.handbook.guides.practices import compare_strategies
from echelon.handbook.guides.situation import MANY_NODES
from tests.handbook.guides.situations import situation


def test_racks_that_are_wired_as_nodes_are_walked_as_nodes() -> None:
    rack, racks = situation("gpt3-175b 64xgb200"), situation("gpt3-175b 128xgb200")
    assert (rack.domain, rack.num_domains, rack.tensor_ranks) == (64, 1, 32)
    assert rack.between is None
    assert rack.inside is not None
    assert not MANY_NODES.ask(rack).yes
    found = MANY_NODES.ask(racks)
    assert found.yes
    assert found.why == "32 nodes, joined by the links of a node in 2 x 64 devices"
    assert racks.between is not None
    rows = {row.kind.strategy.name: row for row in compare_strategies(racks, FRAMEWORKS[OURS])}
    assert rows["tensor"].outcome is None or rows["tensor"].outcome.split.tp <= 64
